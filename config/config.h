// Turns the configuration of a run, a DeepSpeed JSON file or a protobuf text
// file of the same schema, into a complete and checked proto::Config.
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
// config.proto is the only schema. An error is InvalidArgument with all faults
// of the file, joined by "; ", each as
//   file:line:column: path.of.key: what is wrong
//
// Where DeepSpeed ignores or defaults silently, this refuses, or logs a note:
// unknown keys (the message offers the nearest name; they are notes with
// "unknown_keys": "warn", or `ignore_unknown` below), numbers in quotes, batch
// sizes that do not divide, numbers out of range, both names of one key.
// config/auto_values.h resolves "auto". docs/config.md lists the keys. A key
// that is right but not supported in this version is accepted here and refused
// by Engine::Create (CheckRunnable).
#ifndef CONFIG_CONFIG_H_
#define CONFIG_CONFIG_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "config/auto_values.h"
#include "config/config.pb.h"
#include "config/training/training_config.h"  // IWYU pragma: export

namespace tessera {

// Keys that replace those of a file, or are added to it, before it is completed
// and checked, in order: "zero_optimization.stage=1", "optimizer.type=AdamW",
// "optimizer.params.betas=[0.9, 0.95]". Each is KEY=VALUE: the dotted path of a
// key, and JSON or a word that needs no quotes. Their faults are those of a
// file, with "--set" instead of file, line and column.
using ConfigOverrides = std::vector<std::string>;

// Reads, completes and checks a file: protobuf text format if the name ends in
// .textproto or .pbtxt, JSON otherwise. Returns NotFound with the path if there
// is none, and InvalidArgument as above. Rank 0 logs the notes, each once.
// LOCAL.
// `overrides` need a JSON file.
absl::StatusOr<proto::Config> LoadConfig(const std::string& path,
                                         int world_size,
                                         const AutoValues& values = {},
                                         bool ignore_unknown = false,
                                         const ConfigOverrides& overrides = {});

// Whether rank 0 logs the notes of a configuration, each once in a process.
enum class ConfigNotes { kLogged, kDropped };

// Does what LoadConfig does for text in memory. `file_name` is used in
// messages, and its ending selects the format.
absl::StatusOr<proto::Config> ParseConfig(
    absl::string_view text, absl::string_view file_name, int world_size,
    const AutoValues& values = {}, const ConfigOverrides& overrides = {},
    bool ignore_unknown = false, ConfigNotes notes = ConfigNotes::kDropped);

// Does what LoadConfig does for JSON in the program's own code, without a log.
// Errors are "<code>:line:column: path.of.key: what is wrong". LOCAL.
absl::StatusOr<proto::Config> ConfigFromJson(
    absl::string_view json, int world_size,
    const ConfigOverrides& overrides = {});

// Does what LoadConfig does for a TrainingConfig, without a log. LOCAL.
absl::StatusOr<proto::Config> ToConfig(const TrainingConfig& config,
                                       int world_size,
                                       const AutoValues& values = {},
                                       const ConfigOverrides& overrides = {});

// Returns over how many ranks layers are divided (tensor_parallel.autotp_size);
// 1: they are not. LOCAL.
int TensorRanksOf(const proto::Config& config);
// Returns over how many ranks sequences are divided (sequence_parallel_size); 1:
// they are not. LOCAL.
int SequenceRanksOf(const proto::Config& config);
// Returns the number of stages of the pipeline (pipeline.stages); 1: there is
// none. The world size divided by all three is the number of ranks that have
// samples of their own. LOCAL.
int PipelineRanksOf(const proto::Config& config);

// Returns Unimplemented with all that `config` asks for and this version does
// not support. REQUIRES: `config` is completed. LOCAL.
absl::Status CheckRunnable(const proto::Config& config);

// Returns the communication section of a file, checked, with absent keys left
// absent; an empty section if there is none. It looks at no other section, so
// it needs no world size. Errors are those of LoadConfig.
absl::StatusOr<proto::Communication> LoadCommunication(
    const std::string& path, bool ignore_unknown = false,
    const ConfigOverrides& overrides = {});
// Does what LoadCommunication does for text in memory, as ParseConfig.
absl::StatusOr<proto::Communication> ParseCommunication(
    absl::string_view text, absl::string_view file_name,
    bool ignore_unknown = false, const ConfigOverrides& overrides = {});
// Does what LoadCommunication does for a TrainingConfig.
absl::StatusOr<proto::Communication> CommunicationOf(
    const TrainingConfig& config, const ConfigOverrides& overrides = {});

// Completes and checks a Config made in code. The result has
//   - the three batch numbers, with
//       train_batch_size = train_micro_batch_size_per_gpu *
//                          gradient_accumulation_steps * ranks
//     for the ranks that have samples of their own (PipelineRanksOf);
//     of absent ones gradient_accumulation_steps is 1 unless the other two are
//     given, as in DeepSpeed;
//   - every other field that has a default in config.proto, in the sections
//     that are supported. So zero_optimization has either stage, 0 to 3, or
//     auto_stage, which is true then; and sharding either reshard_after_forward
//     or reshard_group_size, a divisor of the world size, which is
//     zero_hpz_partition_size, too, if that is above 1;
//   - zero_optimization.overlap_comm, unless auto_stage: true at stage 3;
//   - fp16 enabled alone, or bf16, torch_autocast, both or none;
//   - words in the case in which config.proto has them;
//   - no deprecated key, but what it stands for;
//   - all fields of optimizer.params, if there is an optimizer of type Adam or
//     AdamW. Both decay weights directly (as AdamW does) unless adam_w_mode is
//     false;
//   - communication as it was.
// Idempotent: the result resolves to itself. LOCAL.
absl::StatusOr<proto::Config> ResolveConfig(const proto::Config& config,
                                            int world_size);

}  // namespace tessera
#endif  // CONFIG_CONFIG_H_
