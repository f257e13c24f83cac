// Trains the peers' GPT on the peers' batches (peer_gpt.h), and prints how long
// a step takes, in one line of JSON.
//
//   train --world 2 --data kjv.txt --stage 3
//   train --world 2 --data kjv.txt --engine none     without communication
//   train --data kjv.txt --config zero3.json         any configuration
//
// With --turns it takes turns with other programs (benchmarks/turns.h); the
// line that begins a turn is its number of steps.
//
// It uses the public API alone, with the default configuration except for the
// flags (train_flags.h).
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/usage.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "base/memory/memory.h"
#include "base/monotonic.h"
#include "base/torch/device_ledger.h"
#include "benchmarks/gpt/made_on_device.h"
#include "benchmarks/gpt/peer_gpt.h"
#include "benchmarks/gpt/plain_gpt.h"
#include "benchmarks/gpt/train_figures.h"
#include "benchmarks/rank_program.h"
#include "benchmarks/train_flags.h"
#include "benchmarks/turns.h"
#include "data/mapped_file.h"
#include "tessera/tessera.h"

namespace tessera {
namespace {

constexpr int kWarmUp = 2;  // steps, neither timed nor in the peaks

absl::StatusOr<at::Device> DeviceOfFlags(const World& world) {
  const std::string name = absl::GetFlag(FLAGS_device);
  if (name == "cpu") return at::Device(at::kCPU);
  if (name == "gpu" && !world.device().is_cpu()) return world.device();
  return absl::InvalidArgumentError(absl::StrCat(
      "--device: expected cpu, or gpu where there is one, got '", name, "'"));
}

struct Batch {
  at::Tensor inputs, targets;
};

// Uses the peers' generator, which gives the peers' indices.
Batch BatchOf(const MappedFile& corpus, int64_t rows, int step, int rank,
              at::Device device) {
  const int64_t seq = absl::GetFlag(FLAGS_seq);
  const auto size = static_cast<int64_t>(corpus.bytes().size());
  auto generator = at::make_generator<at::CPUGeneratorImpl>(
      static_cast<uint64_t>(1000 * step + rank));
  const at::Tensor starts =
      torch::randint(0, size - seq - 1, {rows}, generator);
  const at::Tensor samples = torch::empty({rows, seq + 1}, torch::kLong);
  for (int64_t i = 0; i < rows; ++i) {
    const uint8_t* const from =
        corpus.bytes().data() + starts[i].item<int64_t>();
    std::copy(from, from + seq + 1, samples[i].data_ptr<int64_t>());
  }
  return {samples.slice(1, 0, seq).to(device),
          samples.slice(1, 1, seq + 1).to(device)};
}

// Trainer is one way of training.
class Trainer {
 public:
  virtual ~Trainer() = default;
  // Returns the loss.
  virtual absl::StatusOr<double> Step(const Batch& batch) = 0;
  // Returns Engine::stage and DescribeUnits.
  virtual int Stage() const { return 0; }
  virtual std::vector<std::string> Units() const { return {}; }
  // Return those of the last step; empty for plain libtorch.
  virtual StepMemoryReport Memory() const { return {}; }
  virtual PipelineReport Pipeline() const { return {}; }
};

class Sharded : public Trainer {
 public:
  static absl::StatusOr<std::unique_ptr<Trainer>> Create(
      std::shared_ptr<PeerGpt> model, const proto::Config& config,
      at::Device device) {
    auto trainer = std::make_unique<Sharded>();
    trainer->model_ = std::move(model);
    EngineOptions options;
    options.device = device;
    if (TensorRanksOf(config) > 1 || PipelineRanksOf(config) > 1) {
      options.planned_loss = [model = trainer->model_](int64_t samples) {
        const at::Tensor tokens =
            torch::zeros({samples, absl::GetFlag(FLAGS_seq)}, torch::kLong);
        return model->Loss(tokens, tokens);
      };
    }
    TESSERA_ASSIGN_OR_RETURN(trainer->engine_,
                             Engine::Create(trainer->model_, config, options));
    const std::string init = absl::GetFlag(FLAGS_init);
    if (!init.empty()) {
      TESSERA_RETURN_IF_ERROR(trainer->engine_->LoadSafetensors(init).status());
    }
    return trainer;
  }
  absl::StatusOr<double> Step(const Batch& batch) override {
    const int64_t count = engine_->config().gradient_accumulation_steps();
    const std::vector<at::Tensor> inputs = batch.inputs.chunk(count),
                                  targets = batch.targets.chunk(count);
    TESSERA_ASSIGN_OR_RETURN(
        const std::vector<at::Tensor> losses,
        engine_->TrainBatch([&](int64_t i) {
          const Engine::AutocastScope autocast(engine_.get());  // if it is on
          const auto at = static_cast<size_t>(i);
          return model_->Loss(DivideSequence(*model_, inputs[at], 1),
                              targets[at]);
        }));
    double value = 0;
    for (const at::Tensor& loss : losses) {
      value += loss.item<double>() / static_cast<double>(count);
    }
    // This completes the step, as the next Backward would, within the step's
    // time: Memory() comes after it.
    (void)engine_->last_step();
    return value;
  }
  int Stage() const override { return engine_->stage(); }
  std::vector<std::string> Units() const override {
    return engine_->DescribeUnits();
  }
  StepMemoryReport Memory() const override {
    return engine_->last_step().memory;
  }
  PipelineReport Pipeline() const override {
    return engine_->last_step().pipeline;
  }

 private:
  std::shared_ptr<PeerGpt> model_;
  std::unique_ptr<Engine> engine_;
};

// Trains with plain libtorch.
class Alone : public Trainer {
 public:
  Alone(std::shared_ptr<PeerGpt> model, at::Device device,
        const PlainGptOptions& options)
      : plain_(std::move(model), device, options) {}
  absl::StatusOr<double> Step(const Batch& batch) override {
    return plain_.Step(batch.inputs, batch.targets);
  }

 private:
  PlainGpt plain_;
};

absl::StatusOr<std::unique_ptr<Trainer>> MakeTrainer(
    std::shared_ptr<PeerGpt> model, const proto::Config& config,
    at::Device device) {
  if (absl::GetFlag(FLAGS_engine) == "tessera") {
    return Sharded::Create(std::move(model), config, device);
  }
  return std::unique_ptr<Trainer>(
      std::make_unique<Alone>(std::move(model), device, PlainOptionsOfFlags()));
}

// What is trained, where.
struct Task {
  int64_t rows = 0;  // of a rank's step
  std::string dtype;
  int64_t parameters = 0;
  int alike = 1;       // neighbours that read the same samples
  int data_ranks = 1;  // that do not
  at::Device device = at::kCPU;
};

// Runs steps `begin` to `end` of the training.
absl::Status Train(int rank, const MappedFile& corpus, const Task& task,
                   int begin, int end, Trainer& trainer, Figures* figures,
                   Peaks* peaks) {
  for (int i = begin; i < end; ++i) {
    if (i == kWarmUp) peaks->Restart();
    const Batch batch = BatchOf(corpus, task.rows, i, rank, task.device);
    const absl::Duration start = MonotonicNow();
    TESSERA_ASSIGN_OR_RETURN(const double loss, trainer.Step(batch));
    if (i >= kWarmUp) {
      figures->milliseconds.push_back(
          absl::ToDoubleMilliseconds(MonotonicNow() - start));
    }
    figures->losses.push_back(loss);
    peaks->StepDone(trainer.Memory());
  }
  return absl::OkStatus();
}

Speed SpeedOf(const World& world, const Task& task, const Figures& figures) {
  Speed speed;
  speed.tokens = task.rows * absl::GetFlag(FLAGS_seq) * task.data_ranks;
  speed.flops_per_token =
      6 * task.parameters + 12 * absl::GetFlag(FLAGS_layers) *
                                absl::GetFlag(FLAGS_dim) *
                                absl::GetFlag(FLAGS_seq);
  speed.peak_flops =
      absl::GetFlag(FLAGS_peak_tflops) * 1e12 * world.world_size();
  const std::vector<double>& ms = figures.milliseconds;
  if (ms.empty()) return speed;
  speed.median_ms = Median(ms);
  speed.least_ms = *std::min_element(ms.begin(), ms.end());
  return speed;
}

// Returns the times of rank 0, which is the first stage.
std::string Text(const PipelineReport& report) {
  return absl::StrFormat(
      R"({"stages": %d, "forward_ms": %.1f, "backward_ms": %.1f, )"
      R"("waited_ms": %.1f, "sent_mb": %.2f, "idle": %.3f, "bubble": %.3f})",
      report.stages, absl::ToDoubleMilliseconds(report.forward),
      absl::ToDoubleMilliseconds(report.backward),
      absl::ToDoubleMilliseconds(report.waited),
      static_cast<double>(report.sent_bytes) / (1 << 20), report.idle_share,
      report.bubble);
}

void PrintAll(const World& world, const Task& task, const Trainer& trainer,
              const Figures& figures, const Peaks& peaks, int64_t pss_bytes) {
  const MemoryReport memory = LedgerOf(task.device).Report();
  absl::PrintF(
      R"({"engine": "%s", "stage": %d, "dtype": "%s", "backend": "%s", )"
      R"("world": %d, "params": %d, %s, "loss": [%s], )"
      R"("bytes_at_peak": {"parameters": %d, )"
      R"("gradients": %d, "optimizer": %d, "working": %d}, )"
      R"("activations": %s, "device": %s, "pss_mb": %d, "pipeline": %s, )"
      R"("units": [%s]})"
      "\n",
      absl::GetFlag(FLAGS_engine), trainer.Stage(), task.dtype,
      std::string(world.communicator()->backend()), world.world_size(),
      task.parameters, SpeedOf(world, task, figures).Text(),
      Listed(figures.losses), memory[MemoryKind::kParameters].peak_bytes,
      memory[MemoryKind::kGradients].peak_bytes,
      memory[MemoryKind::kOptimizer].peak_bytes,
      memory[MemoryKind::kWorking].peak_bytes, peaks.ActivationsText(),
      peaks.DeviceText(), pss_bytes >> 20, Text(trainer.Pipeline()),
      absl::StrJoin(trainer.Units(), ", ", [](std::string* out, const auto& u) {
        absl::StrAppend(out, "\"", absl::CEscape(u), "\"");
      }));
}

// Returns the peers' model, with the initial values of seed 0.
std::shared_ptr<PeerGpt> MakeModel(at::Device device) {
  torch::manual_seed(0);
  std::optional<MadeOnDevice> made;
  if (absl::GetFlag(FLAGS_device_init)) made.emplace(device);
  return std::make_shared<PeerGpt>(
      PeerGptOptions{absl::GetFlag(FLAGS_dim), absl::GetFlag(FLAGS_layers),
                     absl::GetFlag(FLAGS_heads), absl::GetFlag(FLAGS_seq)});
}

absl::Status Run(int argc, char** argv) {
  absl::SetProgramUsageMessage("trains the peers' GPT; see --helpfull");
  TESSERA_ASSIGN_OR_RETURN(const WorldOptions options,
                           ReadTrainFlags(argc, argv));
  TESSERA_ASSIGN_OR_RETURN(const World* world, Init(&argc, argv, options));
  TESSERA_ASSIGN_OR_RETURN(const MappedFile corpus,
                           MappedFile::Open(absl::GetFlag(FLAGS_data),
                                            absl::GetFlag(FLAGS_seq) + 2));
  const bool turns = absl::GetFlag(FLAGS_turns);
  if (turns) {
    PrintTurn({});  // libtorch is loaded, nothing more
    (void)NextLine();
  }
  Task task;
  TESSERA_ASSIGN_OR_RETURN(task.device, DeviceOfFlags(*world));
  TESSERA_ASSIGN_OR_RETURN(const proto::Config config,
                           ConfigOfFlags(world->world_size()));
  task.rows = config.train_micro_batch_size_per_gpu() *
              config.gradient_accumulation_steps();
  task.dtype = DtypeOf(config);
  task.alike = TensorRanksOf(config) * SequenceRanksOf(config);
  task.data_ranks = world->world_size() / task.alike / PipelineRanksOf(config);
  auto model = MakeModel(task.device);
  for (const at::Tensor& p : model->parameters()) task.parameters += p.numel();
  TESSERA_ASSIGN_OR_RETURN(const auto trainer,
                           MakeTrainer(std::move(model), config, task.device));
  const bool first = world->rank() == 0;
  Figures all;
  Peaks peaks(task.device);
  int done = 0;
  auto train = [&](int steps) {
    Figures turn;
    const absl::Status status =
        Train(world->rank() / task.alike % task.data_ranks, corpus, task, done,
              done + steps, *trainer, &turn, &peaks);
    done += steps;
    if (status.ok() && turns) PrintTurn(turn);
    for (const double ms : turn.milliseconds) all.milliseconds.push_back(ms);
    for (const double loss : turn.losses) all.losses.push_back(loss);
    return status;
  };
  while (turns) {
    TESSERA_ASSIGN_OR_RETURN(const std::optional<int> steps, NextTurn());
    if (!steps.has_value()) break;
    TESSERA_RETURN_IF_ERROR(train(*steps));
  }
  if (!turns) {
    TESSERA_RETURN_IF_ERROR(train(absl::GetFlag(FLAGS_steps)));
  }
  TESSERA_ASSIGN_OR_RETURN(const int64_t pss, ResidentBytes());
  if (first) PrintAll(*world, task, *trainer, all, peaks, pss);
  return absl::OkStatus();
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  return tessera::RunRank("train", argc, argv, tessera::Run);
}
