// A run that stops and is resumed has the bits of one that never stopped:
// losses, the evaluation's loss, masters, optimizer states, buffers, parameters
// that the engine leaves alone, generators, rates, loss scales.
//
//   ranks {1, 2, 3, two groups of 2} x stage {0, 1, 2, 3}
//   x dtype {fp32, bf16, fp16} x accumulation {1, 3}
//   x learning rate {constant, a schedule, the program's} x save {sync, async}
//
// 18 cells in which every pair of values occurs; all 576 in
// :resume_matrix_test_slow. The model has dropout, a batch norm, and a
// parameter that each rank trains by itself; the save is in the middle of an
// epoch, and of a schedule.
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/env.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "data/distributed_sampler.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/pairwise.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

constexpr int kSteps = 5;
constexpr int kSavedAt = 2;
constexpr int64_t kSamples = 11;

struct Net : torch::nn::Module {
  Net() {
    conv = register_module("conv", torch::nn::Conv2d(3, 6, 3));
    norm = register_module("norm", torch::nn::BatchNorm2d(6));
    dropout = register_module("dropout", torch::nn::Dropout(0.25));
    head = register_module("head", torch::nn::Linear(6, 5));
    offset = register_parameter("offset", torch::zeros({6}));
  }
  at::Tensor Loss(int64_t sample) {
    at::Generator generator =
        at::detail::createCPUGenerator(static_cast<uint64_t>(sample) + 1);
    at::Tensor h = torch::randn({4, 3, 6, 6}, generator);
    h = conv(h.to(conv->weight.dtype()));
    h = torch::relu(norm(h.to(norm->weight.dtype())));
    h = dropout(h.mean({2, 3}) + offset);
    return torch::cross_entropy_loss(
        head(h.to(head->weight.dtype())).to(torch::kFloat),
        torch::randint(5, {4}, generator, torch::kLong));
  }
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Dropout dropout{nullptr};
  torch::nn::Linear head{nullptr};
  at::Tensor offset;  // ignored
};

// A program that trains, as users write them.
class Program {
 public:
  // `schedule` is "constant", "warmup" or "set".
  static absl::StatusOr<std::unique_ptr<Program>> Start(
      const TrainingSpec& spec, const std::string& schedule, uint64_t seed,
      std::shared_ptr<Communicator> comm) {
    auto p = std::make_unique<Program>();
    p->spec_ = spec;
    p->schedule_ = schedule;
    at::set_num_threads(1);
    torch::manual_seed(seed);
    p->net_ = std::make_shared<Net>();
    torch::manual_seed(seed + 100 + static_cast<uint64_t>(comm->rank()));
    DistributedSamplerOptions data;
    data.num_samples = kSamples;
    data.rank = comm->rank();
    data.world_size = comm->world_size();
    TESSERA_ASSIGN_OR_RETURN(auto sampler, DistributedSampler::Create(data));
    p->sampler_ = std::make_unique<DistributedSampler>(std::move(sampler));
    proto::Config config = ConfigOf(spec);
    config.mutable_sharding()->add_ignored_parameters("offset");
    if (schedule == "warmup") {
      config.mutable_scheduler()->set_type("WarmupLR");
      proto::SchedulerParams* params =
          config.mutable_scheduler()->mutable_params();
      params->set_warmup_max_lr(0.02);
      params->set_warmup_num_steps(4);
    }
    EngineOptions options;
    options.communicator = std::move(comm);
    TESSERA_ASSIGN_OR_RETURN(p->engine_,
                             Engine::Create(p->net_, config, options));
    return p;
  }

  absl::Status Train(int until, Record* record) {
    for (int step = static_cast<int>(engine_->step()); step < until; ++step) {
      // The program sets the rate once, before the save.
      if (schedule_ == "set" && step == 1) {
        TESSERA_RETURN_IF_ERROR(engine_->SetLearningRate(0.03));
      }
      for (int i = 0; i < spec_.accumulation; ++i) {
        const at::Tensor loss = net_->Loss(sampler_->Next());
        TESSERA_RETURN_IF_ERROR(engine_->Backward(loss));
        record->push_back(LossLine(step, i, loss));
        TESSERA_RETURN_IF_ERROR(engine_->Step());
      }
      const torch::NoGradGuard no_gradients;
      net_->offset.sub_(net_->offset.grad() / loss_scale(), 0.1);
      net_->offset.mutable_grad().zero_();
      record->push_back(absl::StrCat(
          "step ", step, ": rate ", engine_->last_step().learning_rate,
          " scale ", engine_->last_step().loss_scale, " skipped ",
          engine_->last_step().skipped_steps));
    }
    return absl::OkStatus();
  }

  std::string Position() const {
    return absl::StrCat(sampler_->state().epoch, " ",
                        sampler_->state().position);
  }
  absl::Status Resume(const std::string& dir) {
    TESSERA_ASSIGN_OR_RETURN(const LoadCheckpointReport report,
                             engine_->LoadCheckpoint(dir));
    const std::vector<std::string> words =
        absl::StrSplit(report.client_state, ' ');
    return sampler_->Seek({std::stoll(words.at(0)), std::stoll(words.at(1))});
  }

  absl::Status Tell(Record* record) {
    AddState(*net_, at::detail::getDefaultCPUGenerator().get_state(), record);
    record->push_back(ParameterLine("offset", net_->offset));
    for (const auto& item : net_->named_parameters()) {
      if (item.key() == "offset") continue;
      TESSERA_ASSIGN_OR_RETURN(at::Tensor value, engine_->Master(item.key()));
      record->push_back(ParameterLine(item.key(), value));
      for (const char* which : {"exp_avg", "exp_avg_sq"}) {
        TESSERA_ASSIGN_OR_RETURN(value,
                                 engine_->OptimizerStateOf(item.key(), which));
        record->push_back(ParameterLine(item.key() + "'s state", value));
      }
    }
    const torch::NoGradGuard no_gradients;
    net_->eval();
    record->push_back(LossLine(-1, 0, net_->Loss(kSamples)));
    net_->train();
    return absl::OkStatus();
  }
  Engine& engine() { return *engine_; }

 private:
  double loss_scale() const {
    return spec_.dtype == "fp16" ? engine_->last_step().loss_scale : 1;
  }

  TrainingSpec spec_;
  std::string schedule_;
  std::shared_ptr<Net> net_;
  std::unique_ptr<DistributedSampler> sampler_;
  std::unique_ptr<Engine> engine_;
};

// `args` is "<schedule> <save> <folder>\n<spec>". Returns two records, of the
// run that does not stop and of the other one.
TESSERA_RANK_FUNCTION(BothRuns) {
  const std::vector<std::string> lines = absl::StrSplit(args, '\n');
  const std::vector<std::string> words = absl::StrSplit(lines.at(0), ' ');
  const TrainingSpec spec = TrainingSpec::FromText(lines.at(1));
  const auto start = [&](uint64_t seed) {
    return Program::Start(spec, words.at(0), seed, world.communicator());
  };
  Record whole, parts, after;
  {
    TESSERA_ASSIGN_OR_RETURN(auto program, start(1));
    TESSERA_RETURN_IF_ERROR(program->Train(kSteps, &whole));
    TESSERA_RETURN_IF_ERROR(program->Tell(&whole));
  }
  {
    TESSERA_ASSIGN_OR_RETURN(auto program, start(1));
    TESSERA_RETURN_IF_ERROR(program->Train(kSavedAt, &parts));
    SaveOptions save;
    save.async = words.at(1) == "async";
    TESSERA_RETURN_IF_ERROR(program->engine().SaveCheckpoint(
        words.at(2), program->Position(), save));
    // Later steps are not part of the checkpoint.
    TESSERA_RETURN_IF_ERROR(program->Train(kSavedAt + 1, &after));
    TESSERA_RETURN_IF_ERROR(program->engine().WaitForCheckpoint());
  }
  TESSERA_ASSIGN_OR_RETURN(auto program, start(2));
  TESSERA_RETURN_IF_ERROR(program->Resume(words.at(2)));
  TESSERA_RETURN_IF_ERROR(program->Train(kSteps, &parts));
  TESSERA_RETURN_IF_ERROR(program->Tell(&parts));
  return absl::StrCat(FirstDifference(whole, parts), "\n--\n", whole.size());
}

const Choice kAxes = {4, 4, 3, 2, 3, 2};

class ResumeMatrixTest : public ::testing::TestWithParam<int> {};

TEST_P(ResumeMatrixTest, AsIfItHadNeverStopped) {
  const bool all = EnvString("TESSERA_TEST_CELLS") == "all";
  const TempFolder folder;
  int cells = 0;
  for (const Choice& c : all ? AllChoices(kAxes) : Pairwise(kAxes, 18)) {
    if (static_cast<int>(c[0]) != GetParam()) continue;
    const int world_size = static_cast<int>(c[0]) + 1;
    TrainingSpec spec;
    spec.stage = static_cast<int>(c[1]);
    if (world_size == 4 && spec.stage > 0) spec.shard_group = 2;
    spec.dtype = std::vector<const char*>{"fp32", "bf16", "fp16"}[c[2]];
    spec.fp32_norms = true;
    spec.initial_scale_power = 10;
    spec.loss_scale_window = 2;  // it doubles on the way
    spec.accumulation = c[3] == 0 ? 1 : 3;
    const char* schedule =
        std::vector<const char*>{"constant", "warmup", "set"}[c[4]];
    const char* save = c[5] == 0 ? "sync" : "async";
    const std::string args =
        absl::StrCat(schedule, " ", save, " ", folder / absl::StrCat(cells++),
                     "\n", spec.ToText());
    for (const std::string& answer : RunOnRanks(world_size, "BothRuns", args)) {
      EXPECT_THAT(answer, testing::StartsWith("\n--\n"))
          << world_size << " ranks, " << args;
    }
  }
  EXPECT_GT(cells, 3);
}

INSTANTIATE_TEST_SUITE_P(Ranks, ResumeMatrixTest, ::testing::Range(0, 4),
                         [](const auto& info) {
                           return info.param == 3
                                      ? std::string("TwoGroupsOf2")
                                      : absl::StrCat(info.param + 1, "Ranks");
                         });

}  // namespace
}  // namespace tessera
