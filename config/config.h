// The configuration of a run: a DeepSpeed JSON file, or a protobuf text file of
// the same schema, to a complete and checked proto::Config.
//
//   {                                        train_batch_size: 32
//     "train_batch_size": 32,                train_micro_batch_size_per_gpu: 4
//     "train_micro_batch_size_per_gpu": 4,   gradient_accumulation_steps: 2
//     "gradient_clipping": 0,          W=4   gradient_clipping: 0
//     "optimizer": {"type": "Adam"},   --->  optimizer { type: "Adam" params {
//     "zero_optimization": {                   lr: 0.001 betas: 0.9 ... } }
//       "stage": 3 }                         zero_optimization { stage: 3 ... }
//   }                                        ...
//
// config.proto is the only schema. Every fault is InvalidArgument with all
// faults of the file, joined by "; ", each as
//   file:line:column: path.of.key: what is wrong
// (no line and column for a key that is absent, no file for a proto).
//
// Paths are as written: of keys with several names, with the one that was used.
//
// Where DeepSpeed ignores or defaults silently, this refuses: unknown keys (the
// message offers the nearest name), "auto" (but as stage), numbers in quotes,
// batch sizes that do not divide, numbers outside of their range, both names of
// one key.
#ifndef CONFIG_CONFIG_H_
#define CONFIG_CONFIG_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "config/config.pb.h"

namespace tessera {

// Reads, completes and checks a file: protobuf text format if the name ends in
// .textproto or .pbtxt, JSON otherwise. Returns NotFound with the path if there
// is none, otherwise see above. LOCAL.
absl::StatusOr<proto::Config> LoadConfig(const std::string& path,
                                         int world_size);

// The same for text at hand; `file_name` is used in messages, and its ending
// decides on the format as above.
absl::StatusOr<proto::Config> ParseConfig(absl::string_view text,
                                          absl::string_view file_name,
                                          int world_size);

// The communication section of a file, checked, with absent keys left absent;
// an empty one if there is none. Looks at no other section, so no world size is
// needed. Errors as LoadConfig.
absl::StatusOr<proto::Communication> LoadCommunication(const std::string& path);

// Completes and checks a Config made in code. The result has
//   - the three batch numbers, with
//       train_batch_size = train_micro_batch_size_per_gpu *
//                          gradient_accumulation_steps * world_size;
//     of absent ones gradient_accumulation_steps is 1 unless the other two are
//     given, as in DeepSpeed;
//   - every other field that has a default in config.proto, in all sections but
//     the two below. So zero_optimization has either stage, 0 to 3, or
//     auto_stage, which is true then; and sharding either reshard_after_forward
//     or reshard_group_size, a divisor of the world size;
//   - at most one of bf16, fp16 and torch_autocast enabled;
//   - dtypes in lower case; communication_data_type and precision.buffer_dtype
//     absent if they were;
//   - all fields of optimizer.params, if there is an optimizer; its type is
//     spelled Adam or AdamW. Both decay weights directly (as AdamW does) unless
//     adam_w_mode is false, which needs weight_decay 0 here;
//   - communication as it was.
// Idempotent: the result resolves to itself. LOCAL.
absl::StatusOr<proto::Config> ResolveConfig(const proto::Config& config,
                                            int world_size);

}  // namespace tessera
#endif  // CONFIG_CONFIG_H_
