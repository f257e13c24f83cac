#include "benchmarks/train_flags.h"

#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "benchmarks/program.h"
#include "benchmarks/turns.h"

ABSL_FLAG(std::string, data, "", "The text: any file.");
ABSL_FLAG(std::string, engine, "tessera",
          "tessera; or none: each process trains alone, with libtorch's fused "
          "AdamW, and does not communicate, with --dtype bf16 by autocast; or "
          "plain_bf16: the same with a model in bfloat16 and float32 masters.");
ABSL_FLAG(std::string, config, "",
          "A configuration file for --engine tessera, in place of what "
          "--stage, --dtype, --micro_batch and the like say.");
ABSL_FLAG(bool, device_init, false,
          "Make the parameters on the device: other values than those of the "
          "CPU, and no thread of the CPU draws them.");
ABSL_FLAG(double, peak_tflops, 0,
          "Peak of a rank's device, in TFLOP/s, for the model FLOPs "
          "utilisation (MFU) by 6 N + 12 layers dim seq FLOPs a token, which "
          "counts attention as if it were not causal; 0: none is printed.");
ABSL_FLAG(std::string, device, "cpu", "cpu, or gpu: World::device().");
ABSL_FLAG(int, stage, 3, "ZeRO stage, 0 to 3.");
ABSL_FLAG(int, tensor, 1, "tensor_parallel.autotp_size.");
ABSL_FLAG(int, sequence, 1, "sequence_parallel_size.");
ABSL_FLAG(int, pipeline, 1, "pipeline.stages.");
ABSL_FLAG(int, micro_batches, 1,
          "Micro-batches of a step (gradient_accumulation_steps), each of "
          "--micro_batch sequences.");
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

proto::Config ConfigOfOtherFlags() {
  proto::Config config;
  config.set_train_micro_batch_size_per_gpu(
      static_cast<int32_t>(absl::GetFlag(FLAGS_micro_batch)));
  config.set_gradient_clipping(absl::GetFlag(FLAGS_clip));
  config.mutable_optimizer()->set_type("AdamW");
  config.mutable_optimizer()->mutable_params()->set_lr(kLr);
  config.mutable_optimizer()->mutable_params()->set_weight_decay(kWeightDecay);
  config.mutable_zero_optimization()->set_stage(absl::GetFlag(FLAGS_stage));
  config.mutable_tensor_parallel()->set_autotp_size(
      absl::GetFlag(FLAGS_tensor));
  config.set_sequence_parallel_size(absl::GetFlag(FLAGS_sequence));
  config.mutable_pipeline()->set_stages(absl::GetFlag(FLAGS_pipeline));
  config.set_gradient_accumulation_steps(absl::GetFlag(FLAGS_micro_batches));
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

// Returns InvalidArgument naming the first flag that is not at its default, for
// one that does not go with it.
template <typename... T>
absl::Status AtDefaults(absl::string_view other,
                        const absl::Flag<T>&... flags) {
  absl::Status status;
  const auto check = [&](const absl::CommandLineFlag& flag) {
    if (flag.CurrentValue() == flag.DefaultValue()) return;
    status.Update(absl::InvalidArgumentError(
        absl::StrCat("--", flag.Name(), " is not for ", other)));
  };
  (check(absl::GetFlagReflectionHandle(flags)), ...);
  return status;
}

absl::Status CheckEngine() {
  const std::string engine = absl::GetFlag(FLAGS_engine);
  if (engine != "tessera" && engine != "none" && engine != "plain_bf16") {
    return absl::InvalidArgumentError(absl::StrCat(
        "--engine: expected tessera, none or plain_bf16, got '", engine, "'"));
  }
  if (engine != "tessera") {
    TESSERA_RETURN_IF_ERROR(AtDefaults(absl::StrCat("--engine ", engine),
                                       FLAGS_init, FLAGS_config, FLAGS_sequence,
                                       FLAGS_pipeline, FLAGS_micro_batches));
  }
  if (engine == "plain_bf16" && absl::GetFlag(FLAGS_dtype) != "bf16") {
    return absl::InvalidArgumentError(
        "--engine plain_bf16: expected --dtype bf16");
  }
  if (!(absl::GetFlag(FLAGS_peak_tflops) >= 0)) {
    return absl::InvalidArgumentError("--peak_tflops: expected 0 or more");
  }
  if (absl::GetFlag(FLAGS_config).empty()) return absl::OkStatus();
  return AtDefaults("--config, which says it itself", FLAGS_stage, FLAGS_dtype,
                    FLAGS_tensor, FLAGS_sequence, FLAGS_pipeline,
                    FLAGS_micro_batches, FLAGS_micro_batch, FLAGS_clip,
                    FLAGS_recompute, FLAGS_states_on_disk,
                    FLAGS_parameters_on_disk, FLAGS_early_step, FLAGS_backend);
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
  TESSERA_RETURN_IF_ERROR(CheckEngine());
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

}  // namespace

absl::StatusOr<WorldOptions> ReadTrainFlags(int argc, char** argv) {
  TESSERA_ASSIGN_OR_RETURN(const std::vector<char*> words,
                           ReadTurnFlags(argc, argv, FLAGS_turns));
  TESSERA_RETURN_IF_ERROR(CheckFlags(words));
  WorldOptions options;
  options.backend = absl::GetFlag(FLAGS_backend);
  const std::string config = absl::GetFlag(FLAGS_config);
  return config.empty() ? options : WorldOptionsFrom(config, options);
}

absl::StatusOr<proto::Config> ConfigOfFlags(int world_size) {
  const std::string path = absl::GetFlag(FLAGS_config);
  if (path.empty()) return ConfigOfOtherFlags();
  return LoadConfig(path, world_size);
}

std::string DtypeOf(const proto::Config& config) {
  if (config.fp16().enabled()) return "fp16";
  return config.bf16().enabled() || config.torch_autocast().enabled() ? "bf16"
                                                                      : "fp32";
}

PlainGptOptions PlainOptionsOfFlags() {
  PlainGptOptions options;
  options.lr = kLr;
  options.weight_decay = kWeightDecay;
  options.clip = absl::GetFlag(FLAGS_clip);
  if (absl::GetFlag(FLAGS_dtype) == "bf16") {
    options.precision = absl::GetFlag(FLAGS_engine) == "plain_bf16"
                            ? PlainGpt::Precision::kBfloat16
                            : PlainGpt::Precision::kAutocast;
  }
  return options;
}

}  // namespace tessera
