// TrainingConfig: a configuration in the program's own code. It has fields for
// what most programs set, and `json` for all the rest.
//
//   tessera::TrainingConfig config = {
//       .stage = 3,
//       .micro_batch = 8,
//       .bf16 = true,
//       .optimizer = {.type = "AdamW", .lr = 3e-4, .weight_decay = 0.1},
//       .schedule = {.type = "WarmupCosineLR",
//                    .warmup_steps = 100,
//                    .total_steps = 2000},
//       .json = R"({"sharding": {"report_grad_norm": true}})"};
//
//   tessera::Start(&argc, argv, {.training = config});    // job.config
//   tessera::ToConfig(config, world->world_size());       // without Start
//
// Each field is a key of a configuration file, in the comment behind it; what
// is unset is as if the file did not have the key. So docs/config.md has
// defaults, ranges and meaning, and the faults are those of a file, with
// "TrainingConfig" instead of the file's name:
//
//   TrainingConfig: zero_optimization.stage: expected 0, 1, 2 or 3, got 7
//   TrainingConfig:1:14: sharding.report_grad: unknown key, did you mean ...
//
// (1:14 is line and column in `json`.) A key that both a field and `json` set
// is an error. Seeds are SeedAll's, and deterministic algorithms libtorch's own
// switch (docs/determinism.md).
//
// Designated initializers are C++20; clang and gcc take them in C++17, too, and
// warn with -Wpedantic (config.stage = 3 does as well). They come in the order
// of the fields.
#ifndef CONFIG_TRAINING_TRAINING_CONFIG_H_
#define CONFIG_TRAINING_TRAINING_CONFIG_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

struct TrainingConfig {
  // The optimizer of the parameters.
  struct Optimizer {
    std::string type;                    // optimizer.type; "": no optimizer
    std::optional<double> lr;            // optimizer.params.lr
    std::vector<double> betas;           // optimizer.params.betas; empty: unset
    std::optional<double> eps;           // optimizer.params.eps
    std::optional<double> weight_decay;  // optimizer.params.weight_decay
    // optimizer.no_decay: "auto" spares biases, norms and embeddings the decay.
    std::string no_decay;
  };
  // For "WarmupLR", "WarmupDecayLR", "WarmupCosineLR" and "WSD"; others have
  // parameters of their own, in `json`.
  struct Schedule {
    std::string type;                     // scheduler.type; "": no schedule
    std::optional<int64_t> warmup_steps;  // scheduler.params.warmup_num_steps
    std::optional<int64_t> total_steps;   // scheduler.params.total_num_steps
  };
  // "cpu" or "nvme"; "": where the module is.
  struct Offload {
    std::string optimizer;   // zero_optimization.offload_optimizer.device
    std::string parameters;  // zero_optimization.offload_param.device
    // nvme_path of those two that are "nvme".
    std::string nvme_path;
  };
  // When a CheckpointManager saves, and what it keeps.
  struct Checkpoints {
    std::string folder;                   // checkpoint.folder
    std::optional<int64_t> every_steps;   // checkpoint.every_steps
    std::optional<double> every_minutes;  // checkpoint.every_minutes
    std::optional<int> keep_last;         // checkpoint.keep_last
    std::optional<bool> async;            // checkpoint.async
  };

  std::optional<int> stage;             // zero_optimization.stage
  std::optional<int64_t> batch;         // train_batch_size
  std::optional<int64_t> micro_batch;   // train_micro_batch_size_per_gpu
  std::optional<int64_t> accumulation;  // gradient_accumulation_steps
  std::optional<bool> bf16;             // bf16.enabled
  std::optional<bool> fp16;             // fp16.enabled
  Optimizer optimizer;
  std::optional<double> gradient_clipping;  // gradient_clipping
  Schedule schedule;
  Offload offload;
  // activation_checkpointing.units: {"auto"}, or classes of modules.
  std::vector<std::string> recompute;
  Checkpoints checkpoints;
  std::optional<int64_t> steps_per_print;  // steps_per_print
  std::string json;  // an object with any other keys; "": none
};

// Returns the keys that the fields set, without `json`, each as KEY=VALUE.
// Pure.
std::vector<std::string> KeysOf(const TrainingConfig& config);

}  // namespace tessera
#endif  // CONFIG_TRAINING_TRAINING_CONFIG_H_
