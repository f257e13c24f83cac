// AutoValues is what the program knows, for the values that a configuration
// leaves to it by "auto", resolved as in Hugging Face's integration of
// DeepSpeed.
//
//   train_micro_batch_size_per_gpu       per_device_train_batch_size; without
//                                        it, beside a train_batch_size,
//                                        auto_micro_batch
//   gradient_accumulation_steps          gradient_accumulation_steps
//   train_batch_size                     the product with the world size
//   gradient_clipping                    max_grad_norm
//   optimizer.params.lr, eps, ...        learning_rate, adam_epsilon, ...
//   optimizer.params.betas               adam_beta1, adam_beta2
//   scheduler.params.warmup_max_lr       learning_rate; warmup_min_lr: 0
//   scheduler.params.warmup_num_steps    warmup_steps
//   scheduler.params.total_num_steps     max_steps, above 0
//   bf16.enabled, fp16.enabled           bf16, fp16; of an absent one the
//                                        other's: false
//   zero_optimization.reduce_bucket_size               hidden_size^2
//     ...stage3_prefetch_bucket_size                   0.9 * hidden_size^2
//     ...stage3_param_persistence_threshold            10 * hidden_size
//
// Any other key of a section that DeepSpeed checks (zero_optimization, bf16,
// ...) gets its default, with a note, as there; so do those above where the
// value is absent. Any other key, and one of the batch, the optimizer or the
// schedule whose value is absent, is a fault that names what is needed.
#ifndef CONFIG_AUTO_VALUES_H_
#define CONFIG_AUTO_VALUES_H_

#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tessera {

struct AutoValues {
  std::optional<int64_t> per_device_train_batch_size;  // samples
  std::optional<int64_t> gradient_accumulation_steps;
  std::optional<double> learning_rate;
  std::optional<double> adam_beta1;
  std::optional<double> adam_beta2;
  std::optional<double> adam_epsilon;
  std::optional<double> weight_decay;
  std::optional<double> max_grad_norm;
  std::optional<int64_t> warmup_steps;
  std::optional<int64_t> max_steps;  // 0, -1: not known, as in Hugging Face's
  std::optional<bool> bf16;
  std::optional<bool> fp16;
  std::optional<int64_t> hidden_size;

  // Parses "learning_rate=5e-5,bf16=true". InvalidArgument names a word that is
  // not a name, a value of the wrong kind, or a name that is given twice.
  static absl::StatusOr<AutoValues> Parse(absl::string_view text);
};

}  // namespace tessera
#endif  // CONFIG_AUTO_VALUES_H_
