// Trains the peers' GPT on the peers' batches (peer_gpt.h), and prints how long
// a step takes, in one line of JSON.
//
//   train --world 2 --data kjv.txt --stage 3
//   train --world 2 --data kjv.txt --engine none     without communication
//
// With --turns it takes turns with other programs (benchmarks/turns.h); the
// line that begins a turn is its number of steps.
//
// It uses the public API alone (and comm/launch/job.h, to read the flags), with
// the default configuration except for the flags.
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/autocast_mode.h"
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
#include "benchmarks/peer_gpt.h"
#include "benchmarks/plain_libtorch.h"
#include "benchmarks/program.h"
#include "benchmarks/rank_program.h"
#include "benchmarks/train_figures.h"
#include "benchmarks/turns.h"
#include "comm/launch/job.h"
#include "data/mapped_file.h"
#include "engine/tessera.h"
#include "verify/plain/plain_autograd.h"

ABSL_FLAG(std::string, data, "", "The text: any file.");
ABSL_FLAG(std::string, engine, "tessera",
          "tessera, or none: each process trains alone, with libtorch's fused "
          "AdamW, and does not communicate.");
ABSL_FLAG(std::string, device, "cpu", "cpu, or gpu: World::device().");
ABSL_FLAG(int, stage, 3, "ZeRO stage, 0 to 3.");
ABSL_FLAG(int64_t, dim, 512, "Width of the model.");
ABSL_FLAG(int64_t, layers, 8, "Blocks.");
ABSL_FLAG(int64_t, heads, 8, "Heads of attention.");
ABSL_FLAG(int64_t, seq, 256, "Bytes of context.");
ABSL_FLAG(int64_t, micro_batch, 2, "Sequences of a rank's step.");
ABSL_FLAG(std::string, dtype, "fp32", "fp32 or bf16.");
ABSL_FLAG(double, clip, 0, "Norm that gradients are clipped to; 0: none.");
ABSL_FLAG(
    std::string, recompute, "",
    "Computes the blocks' activations again in backward: full or selective "
    "(activation_checkpointing.policy); none by default.");
ABSL_FLAG(std::string, states_on_disk, "",
          "A folder where the optimizer's states are "
          "(zero_optimization.offload_optimizer); in memory by default.");
ABSL_FLAG(std::string, parameters_on_disk, "",
          "A folder where the parameters' shards are, too "
          "(zero_optimization.offload_param), none of them in memory; the "
          "states as well, unless --states_on_disk says where.");
ABSL_FLAG(bool, early_step, true, "sharding.offload.early_step.");
ABSL_FLAG(int, steps, 8, "Steps; the first two are not timed.");
ABSL_FLAG(bool, turns, false, "Take turns: see the top of train.cc.");
ABSL_FLAG(std::string, backend, "auto", "auto, shm, gloo, hierarchical, nccl.");
ABSL_FLAG(std::string, init, "",
          "safetensors file of the initial weights; else those of seed 0.");

namespace tessera {
namespace {

constexpr double kLr = 1e-3, kWeightDecay = 0.01;
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
Batch BatchOf(const MappedFile& corpus, int step, int rank, at::Device device) {
  const int64_t seq = absl::GetFlag(FLAGS_seq);
  const int64_t rows = absl::GetFlag(FLAGS_micro_batch);
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
  // Returns Engine::DescribeUnits.
  virtual std::vector<std::string> Units() const { return {}; }
  // Returns that of the last step; empty for plain libtorch.
  virtual StepMemoryReport Memory() const { return {}; }
};

void SetOffload(proto::ZeroOptimization* zero) {
  std::string states = absl::GetFlag(FLAGS_states_on_disk);
  const std::string parameters = absl::GetFlag(FLAGS_parameters_on_disk);
  if (!parameters.empty()) {
    zero->mutable_offload_param()->set_device("nvme");
    zero->mutable_offload_param()->set_nvme_path(parameters);
    zero->mutable_offload_param()->set_max_in_cpu(0);
    if (states.empty()) states = parameters;
  }
  if (states.empty()) return;
  zero->mutable_offload_optimizer()->set_device("nvme");
  zero->mutable_offload_optimizer()->set_nvme_path(states);
}

proto::Config ConfigOfFlags() {
  proto::Config config;
  config.set_train_micro_batch_size_per_gpu(
      static_cast<int32_t>(absl::GetFlag(FLAGS_micro_batch)));
  config.set_gradient_clipping(absl::GetFlag(FLAGS_clip));
  config.mutable_optimizer()->set_type("AdamW");
  config.mutable_optimizer()->mutable_params()->set_lr(kLr);
  config.mutable_optimizer()->mutable_params()->set_weight_decay(kWeightDecay);
  config.mutable_zero_optimization()->set_stage(absl::GetFlag(FLAGS_stage));
  SetOffload(config.mutable_zero_optimization());
  config.mutable_sharding()->mutable_offload()->set_early_step(
      absl::GetFlag(FLAGS_early_step));
  const std::string recompute = absl::GetFlag(FLAGS_recompute);
  if (!recompute.empty()) {
    config.mutable_activation_checkpointing()->add_units("PeerBlock");
    config.mutable_activation_checkpointing()->set_policy(recompute);
  }
  if (absl::GetFlag(FLAGS_dtype) == "bf16") {
    config.mutable_bf16()->set_enabled(true);
    config.set_communication_data_type("fp32");  // as the peers'
  }
  return config;
}

class Sharded : public Trainer {
 public:
  static absl::StatusOr<std::unique_ptr<Trainer>> Create(
      std::shared_ptr<PeerGpt> model, at::Device device) {
    auto trainer = std::make_unique<Sharded>();
    trainer->model_ = std::move(model);
    EngineOptions options;
    options.device = device;
    TESSERA_ASSIGN_OR_RETURN(
        trainer->engine_,
        Engine::Create(trainer->model_, ConfigOfFlags(), options));
    const std::string init = absl::GetFlag(FLAGS_init);
    if (!init.empty()) {
      TESSERA_RETURN_IF_ERROR(trainer->engine_->LoadSafetensors(init).status());
    }
    return trainer;
  }
  absl::StatusOr<double> Step(const Batch& batch) override {
    const at::Tensor loss = model_->Loss(batch.inputs, batch.targets);
    TESSERA_RETURN_IF_ERROR(engine_->Backward(loss));
    TESSERA_RETURN_IF_ERROR(engine_->Step());
    const double value = loss.item<double>();
    // This completes the step, as the next Backward would, within the step's
    // time: Memory() comes after it.
    (void)engine_->last_step();
    return value;
  }
  std::vector<std::string> Units() const override {
    return engine_->DescribeUnits();
  }
  StepMemoryReport Memory() const override {
    return engine_->last_step().memory;
  }

 private:
  std::shared_ptr<PeerGpt> model_;
  std::unique_ptr<Engine> engine_;
};

// Trains with plain libtorch, as the peers' "single" does; with autocast for
// bf16.
class Alone : public Trainer {
 public:
  Alone(std::shared_ptr<PeerGpt> model, at::Device device)
      : device_(device.type()),
        model_(std::move(model)),
        optimizer_(model_->parameters(), kLr, kWeightDecay) {
    at::autocast::set_autocast_dtype(device_, at::kBFloat16);
  }

  absl::StatusOr<double> Step(const Batch& batch) override {
    const bool bf16 = absl::GetFlag(FLAGS_dtype) == "bf16";
    at::autocast::set_autocast_enabled(device_, bf16);
    const at::Tensor loss = model_->Loss(batch.inputs, batch.targets);
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(device_, false);
    loss.backward();
    if (absl::GetFlag(FLAGS_clip) > 0) {
      torch::nn::utils::clip_grad_norm_(optimizer_.parameters(),
                                        absl::GetFlag(FLAGS_clip));
    }
    optimizer_.Step();
    return loss.item<double>();
  }

 private:
  const at::DeviceType device_;
  const PlainAutograd plain_autograd_;
  std::shared_ptr<PeerGpt> model_;
  PlainAdamW optimizer_;
};

absl::StatusOr<std::unique_ptr<Trainer>> MakeTrainer(
    std::shared_ptr<PeerGpt> model, at::Device device) {
  const std::string engine = absl::GetFlag(FLAGS_engine);
  if (engine == "tessera") return Sharded::Create(std::move(model), device);
  if (engine != "none") {
    return absl::InvalidArgumentError(
        absl::StrCat("--engine: expected tessera or none, got '", engine, "'"));
  }
  if (!absl::GetFlag(FLAGS_init).empty()) {
    return absl::InvalidArgumentError("--init is not for --engine none");
  }
  model->to(device);
  return std::unique_ptr<Trainer>(
      std::make_unique<Alone>(std::move(model), device));
}

// Runs steps `begin` to `end` of the training.
absl::Status Train(int rank, const MappedFile& corpus, at::Device device,
                   int begin, int end, Trainer& trainer, Figures* figures,
                   Peaks* peaks) {
  for (int i = begin; i < end; ++i) {
    if (i == kWarmUp) peaks->Restart();
    const Batch batch = BatchOf(corpus, i, rank, device);
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

void PrintAll(const World& world, at::Device device, int64_t parameters,
              const Trainer& trainer, const Figures& figures,
              const Peaks& peaks, int64_t pss_bytes) {
  const bool alone = absl::GetFlag(FLAGS_engine) == "none";
  const std::vector<double>& ms = figures.milliseconds;
  const double median = ms.empty() ? 0 : Median(ms);
  const double tokens =
      static_cast<double>(absl::GetFlag(FLAGS_micro_batch) *
                          absl::GetFlag(FLAGS_seq) * world.world_size());
  const MemoryReport memory = LedgerOf(device).Report();
  absl::PrintF(
      R"({"engine": "%s", "stage": %d, "dtype": "%s", "backend": "%s", )"
      R"("world": %d, "params": %d, "step_ms": %.2f, "min_ms": %.2f, )"
      R"("tok_s": %.0f, "loss": [%s], "bytes_at_peak": {"parameters": %d, )"
      R"("gradients": %d, "optimizer": %d, "working": %d}, )"
      R"("activations": %s, "device": %s, "pss_mb": %d, "units": [%s]})"
      "\n",
      absl::GetFlag(FLAGS_engine), alone ? 0 : absl::GetFlag(FLAGS_stage),
      absl::GetFlag(FLAGS_dtype), std::string(world.communicator()->backend()),
      world.world_size(), parameters, median,
      ms.empty() ? 0 : *std::min_element(ms.begin(), ms.end()),
      median > 0 ? tokens / median * 1e3 : 0, Listed(figures.losses),
      memory[MemoryKind::kParameters].peak_bytes,
      memory[MemoryKind::kGradients].peak_bytes,
      memory[MemoryKind::kOptimizer].peak_bytes,
      memory[MemoryKind::kWorking].peak_bytes, peaks.ActivationsText(),
      peaks.DeviceText(), pss_bytes >> 20,
      absl::StrJoin(trainer.Units(), ", ", [](std::string* out, const auto& u) {
        absl::StrAppend(out, "\"", absl::CEscape(u), "\"");
      }));
}

// `words` is what is left of the command line.
absl::Status CheckFlags(const std::vector<char*>& words) {
  TESSERA_RETURN_IF_ERROR(FlagsAlone(words));
  constexpr int64_t kMost = 1 << 20;  // beyond it sizes would overflow
  const std::pair<const char*, int64_t> sizes[] = {
      {"dim", absl::GetFlag(FLAGS_dim)},
      {"layers", absl::GetFlag(FLAGS_layers)},
      {"heads", absl::GetFlag(FLAGS_heads)},
      {"seq", absl::GetFlag(FLAGS_seq)},
      {"micro_batch", absl::GetFlag(FLAGS_micro_batch)},
      {"steps", absl::GetFlag(FLAGS_steps)}};
  for (const auto& [name, value] : sizes) {
    if (value >= 1 && value <= kMost) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--", name, ": expected 1 to ", kMost, ", got ", value));
  }
  const std::string dtype = absl::GetFlag(FLAGS_dtype);
  if (dtype != "fp32" && dtype != "bf16") {
    return absl::InvalidArgumentError(
        absl::StrCat("--dtype: expected fp32 or bf16, got '", dtype, "'"));
  }
  if (absl::GetFlag(FLAGS_data).empty()) {
    return absl::InvalidArgumentError("--data FILE is missing");
  }
  if (absl::GetFlag(FLAGS_dim) % absl::GetFlag(FLAGS_heads) != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--dim: expected a multiple of --heads ", absl::GetFlag(FLAGS_heads),
        ", got ", absl::GetFlag(FLAGS_dim)));
  }
  return absl::OkStatus();
}

absl::StatusOr<WorldOptions> ReadFlags(int argc, char** argv) {
  TESSERA_ASSIGN_OR_RETURN(const std::vector<char*> words,
                           ReadTurnFlags(argc, argv, FLAGS_turns));
  TESSERA_RETURN_IF_ERROR(CheckFlags(words));
  WorldOptions options;
  options.backend = absl::GetFlag(FLAGS_backend);
  return options;
}

absl::Status Run(int argc, char** argv) {
  absl::SetProgramUsageMessage("trains the peers' GPT; see --helpfull");
  TESSERA_ASSIGN_OR_RETURN(const WorldOptions options, ReadFlags(argc, argv));
  TESSERA_ASSIGN_OR_RETURN(const World* world, Init(&argc, argv, options));
  TESSERA_ASSIGN_OR_RETURN(const MappedFile corpus,
                           MappedFile::Open(absl::GetFlag(FLAGS_data),
                                            absl::GetFlag(FLAGS_seq) + 2));
  const bool turns = absl::GetFlag(FLAGS_turns);
  if (turns) {
    PrintTurn({});  // libtorch is loaded, nothing more
    (void)NextLine();
  }
  torch::manual_seed(0);
  auto model = std::make_shared<PeerGpt>(
      PeerGptOptions{absl::GetFlag(FLAGS_dim), absl::GetFlag(FLAGS_layers),
                     absl::GetFlag(FLAGS_heads), absl::GetFlag(FLAGS_seq)});
  int64_t parameters = 0;
  for (const at::Tensor& p : model->parameters()) parameters += p.numel();
  TESSERA_ASSIGN_OR_RETURN(const at::Device device, DeviceOfFlags(*world));
  TESSERA_ASSIGN_OR_RETURN(const auto trainer,
                           MakeTrainer(std::move(model), device));
  const bool first = world->rank() == 0;
  Figures all;
  Peaks peaks(device);
  int done = 0;
  auto train = [&](int steps) {
    Figures turn;
    const absl::Status status = Train(world->rank(), corpus, device, done,
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
  if (first) PrintAll(*world, device, parameters, *trainer, all, peaks, pss);
  return absl::OkStatus();
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  return tessera::RunRank("train", argc, argv, tessera::Run);
}
