#include "tests/training.h"

#include <torch/torch.h>

#include <map>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/bits.h"
#include "base/memory.h"
#include "base/status.h"
#include "engine/engine.h"

namespace tessera {
namespace {

constexpr uint64_t kModelSeed = 20;
constexpr uint64_t kRankSeed = 7000;
constexpr double kLr = 1e-2;
constexpr double kWeightDecay = 0.1;

// How libtorch cuts a sum into threads is not what is compared here.
void UseOneThread() { at::set_num_threads(1); }

std::string LossLine(int step, int micro_batch, const at::Tensor& loss) {
  return absl::StrCat("step ", step, ", micro-batch ", micro_batch, ": loss ",
                      HexFloat(loss.item<float>()));
}

void AddState(const torch::nn::Module& module, const at::Tensor& generator,
              Record* record) {
  for (const auto& buffer : module.named_buffers()) {
    record->push_back(
        absl::StrCat("buffer ", buffer.key(), " ", PrintOf(buffer.value())));
  }
  record->push_back(absl::StrCat("generator ", PrintOf(generator)));
}

std::vector<Record> RecordOracle(const TrainingSpec& spec, int world_size) {
  UseOneThread();
  Oracle oracle([&] { return MakeTestModel(spec.model); },
                OracleOptionsOf(spec, world_size));
  std::vector<Record> records(static_cast<size_t>(world_size));
  auto add_to_all = [&](const std::string& line) {
    for (Record& record : records) record.push_back(line);
  };
  for (int step = 0; step < spec.steps; ++step) {
    auto losses = oracle.TrainStep([](torch::nn::Module& module, int rank,
                                      int64_t micro_batch) {
      return dynamic_cast<TestModel&>(module).Loss(rank, micro_batch);
    });
    for (size_t r = 0; r < records.size(); ++r) {
      for (int i = 0; i < spec.accumulation; ++i) {
        records[r].push_back(LossLine(step, i, losses[r][i]));
      }
    }
    if (!spec.gradients) continue;
    for (const std::string& name : oracle.parameter_names()) {
      add_to_all(absl::StrCat("step ", step, ": gradient of ", name, " ",
                              PrintOf(oracle.gradient(name))));
    }
  }
  for (const std::string& name : oracle.parameter_names()) {
    add_to_all(
        absl::StrCat("parameter ", name, " ", PrintOf(oracle.parameter(name))));
  }
  for (int r = 0; r < world_size; ++r) {
    AddState(oracle.module(r), oracle.generator_state(r), &records[r]);
  }
  return records;
}

// Names of distinct parameters, as the oracle has them.
std::vector<std::string> ParameterNames(const torch::nn::Module& module) {
  std::vector<std::string> names;
  std::vector<const void*> seen;
  for (const auto& p : module.named_parameters()) {
    const void* impl = p.value().unsafeGetTensorImpl();
    if (std::find(seen.begin(), seen.end(), impl) != seen.end()) continue;
    seen.push_back(impl);
    names.push_back(p.key());
  }
  return names;
}

}  // namespace

std::string TrainingSpec::ToText() const {
  return absl::StrJoin(std::make_tuple(model, stage, steps, accumulation,
                                       live_units, static_cast<int>(poison),
                                       static_cast<int>(gradients)),
                       " ");
}

TrainingSpec TrainingSpec::FromText(absl::string_view text) {
  TrainingSpec spec;
  std::istringstream in{std::string(text)};
  in >> spec.model >> spec.stage >> spec.steps >> spec.accumulation >>
      spec.live_units >> spec.poison >> spec.gradients;
  TORCH_CHECK(!in.fail(), "not a TrainingSpec: ", std::string(text));
  return spec;
}

std::shared_ptr<TestModel> BuildModel(absl::string_view name, int rank) {
  UseOneThread();
  torch::manual_seed(kModelSeed);
  auto model = MakeTestModel(name);
  torch::manual_seed(kRankSeed + static_cast<uint64_t>(rank));
  return model;
}

proto::Config ConfigOf(const TrainingSpec& spec) {
  proto::Config config;
  config.set_train_micro_batch_size_per_gpu(1);
  config.set_gradient_accumulation_steps(spec.accumulation);
  config.set_gradient_clipping(0);
  config.mutable_zero_optimization()->set_stage(spec.stage);
  config.mutable_optimizer()->set_type("AdamW");
  config.mutable_optimizer()->mutable_params()->set_lr(kLr);
  config.mutable_optimizer()->mutable_params()->set_weight_decay(kWeightDecay);
  return config;
}

OracleOptions OracleOptionsOf(const TrainingSpec& spec, int world_size) {
  OracleOptions options;
  options.world_size = world_size;
  options.accumulation = spec.accumulation;
  options.model_seed = kModelSeed;
  options.rank_seed = kRankSeed;
  options.lr = kLr;
  options.weight_decay = kWeightDecay;
  return options;
}

absl::StatusOr<Record> TrainWithEngine(const TrainingSpec& spec,
                                       std::shared_ptr<Communicator> comm) {
  const int rank = comm->rank();
  SetPoisonOnFree(spec.poison);
  auto model = BuildModel(spec.model, rank);
  EngineOptions options;
  options.communicator = std::move(comm);
  options.live_units = spec.live_units;
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           Engine::Create(model, ConfigOf(spec), options));
  const std::vector<std::string> names = ParameterNames(*model);
  Record record;
  for (int step = 0; step < spec.steps; ++step) {
    for (int i = 0; i < spec.accumulation; ++i) {
      at::Tensor loss = model->Loss(rank, step * spec.accumulation + i);
      TESSERA_RETURN_IF_ERROR(engine->Backward(loss));
      record.push_back(LossLine(step, i, loss));
      if (i + 1 < spec.accumulation) TESSERA_RETURN_IF_ERROR(engine->Step());
    }
    for (const std::string& name : names) {
      if (!spec.gradients) break;
      TESSERA_ASSIGN_OR_RETURN(at::Tensor gradient, engine->Gradient(name));
      record.push_back(absl::StrCat("step ", step, ": gradient of ", name, " ",
                                    PrintOf(gradient)));
    }
    TESSERA_RETURN_IF_ERROR(engine->Step());
  }
  std::map<std::string, std::string> prints;
  for (const std::string& name : names) {
    TESSERA_ASSIGN_OR_RETURN(at::Tensor parameter, engine->Parameter(name));
    prints[name] = PrintOf(parameter);
    record.push_back(absl::StrCat("parameter ", name, " ", prints[name]));
  }
  AddState(*model, at::detail::getDefaultCPUGenerator().get_state(), &record);
  TESSERA_RETURN_IF_ERROR(engine->Close());
  for (const auto& p : model->named_parameters()) {
    auto before = prints.find(p.key());
    if (before == prints.end()) continue;  // another name of a tied one
    const std::string now = PrintOf(p.value().detach());
    if (now == before->second) continue;
    return absl::InternalError(absl::StrCat("after Close, ", p.key(), " is ",
                                            now, ", expected ",
                                            before->second));
  }
  return record;
}

const std::vector<Record>& TrainWithOracle(const TrainingSpec& spec,
                                           int world_size) {
  static auto* records = new std::map<std::string, std::vector<Record>>();
  TrainingSpec same = spec;
  same.stage = same.live_units = 0;
  same.poison = false;
  auto [it, absent] =
      records->try_emplace(absl::StrCat(same.ToText(), " W", world_size));
  if (absent) it->second = RecordOracle(spec, world_size);
  return it->second;
}

std::string FirstDifference(const Record& expected, const Record& got) {
  for (size_t i = 0; i < std::max(expected.size(), got.size()); ++i) {
    const std::string want = i < expected.size() ? expected[i] : "nothing";
    const std::string have = i < got.size() ? got[i] : "nothing";
    if (want != have) {
      return absl::StrCat("expected: ", want, "\n     got: ", have);
    }
  }
  return "";
}

std::string PrintOf(const at::Tensor& tensor) {
  if (!tensor.defined()) return "none";
  const at::Tensor dense = tensor.detach().contiguous();
  return absl::StrFormat(
      "[%s] %s %016x", absl::StrJoin(dense.sizes(), ", "),
      c10::toString(dense.scalar_type()),
      Fingerprint(dense.const_data_ptr(),
                  static_cast<int64_t>(dense.nbytes())));
}

}  // namespace tessera
