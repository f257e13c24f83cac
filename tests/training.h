// Training: one run of a test model, by the engine on this rank or by the
// oracle for all ranks, and what came of it as lines of text that must be
// equal.
//
//   step 2, micro-batch 0: loss 0x1.8p+0
//   step 2: gradient of out.bias 5 float 0123456789abcdef
//   step 2: scale 0x1p+16, norm 0x1.8p+0
//   step 3: skipped, scale 0x1p+16
//   parameter out.bias 5 float fedcba9876543210
//   buffer norm1.running_mean ...
//   generator ...
#ifndef TESTS_TRAINING_H_
#define TESTS_TRAINING_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "comm/communicator.h"
#include "config/config.pb.h"
#include "engine/engine.h"
#include "tests/models.h"
#include "tests/oracle.h"

namespace tessera {

struct TrainingSpec {
  // What is computed. Dtypes are "fp32", "bf16" or "fp16".
  std::string model = "Mlp";
  int steps = 3;
  int accumulation = 1;
  std::string dtype = "fp32";              // of parameters; fp32: as they are
  bool fp32_norms = false;                 // but for those of norms
  std::string buffer_dtype;                // of buffers; "": as they are
  std::string reduce_dtype;                // communication_data_type, or ""
  std::string accumulation_mode = "each";  // or "local"
  std::string reduction = "mean";          // or "sum"
  double predivide = 1;                    // gradient_predivide_factor
  double clipping = 0;                     // 0: none
  bool check_overflow = true;              // with bf16
  double loss_scale = 0;                   // with fp16; 0: dynamic, that is:
  int initial_scale_power = 16;
  int loss_scale_window = 1000;
  int hysteresis = 2;
  int min_loss_scale = 1;
  bool gradients = false;  // every step's gradients go into the record
  bool outcomes = false;   // and so do its scale and norm

  // How; the result is the same. -1: the configuration's default.
  int stage = 0;
  bool overlap = true;  // overlap_comm
  std::string reshard;  // reshard_after_forward: "true", "false", a number
  int64_t prefetch_bucket_size = -1;
  int64_t param_persistence_threshold = -1;
  int64_t max_live_parameters = -1;
  int64_t max_reuse_distance = -1;
  int live_units = 2;   // EngineOptions
  bool poison = false;  // SetPoisonOnFree

  // "model=Gpt stage=3", what is not as above, and back. Of two fields of a
  // name the first one counts.
  std::string ToText() const;
  static TrainingSpec FromText(absl::string_view text);
};

using Record = std::vector<std::string>;

// The model as every rank builds it; the default generator is then that of the
// rank.
std::shared_ptr<TestModel> BuildModel(absl::string_view name, int rank);
proto::Config ConfigOf(const TrainingSpec& spec);
OracleOptions OracleOptionsOf(const TrainingSpec& spec, int world_size);

// COLLECTIVE.
absl::StatusOr<std::unique_ptr<Engine>> MakeEngine(
    std::shared_ptr<torch::nn::Module> model, const TrainingSpec& spec,
    std::shared_ptr<Communicator> comm);

// The two parts of a record: steps [first, spec.steps), and the state after
// them. COLLECTIVE.
absl::Status TrainSteps(Engine& engine, TestModel& model,
                        const TrainingSpec& spec, int rank, int first,
                        Record* record);
absl::Status AddFinalState(Engine& engine, const TestModel& model,
                           Record* record);

// Both, from the start. COLLECTIVE. The model is closed and plain at the end.
absl::StatusOr<Record> TrainWithEngine(const TrainingSpec& spec,
                                       std::shared_ptr<Communicator> comm);
// The records of all ranks. What gives the same result is trained once per
// process.
const std::vector<Record>& TrainWithOracle(const TrainingSpec& spec,
                                           int world_size);
// Trains `spec` on ranks of RankPool::Get(world_size) and here, and expects the
// same.
void ExpectEqualsOracle(const TrainingSpec& spec, int world_size);

// The lines of parameters alone. The first is COLLECTIVE.
absl::StatusOr<Record> ParametersOf(Engine& engine,
                                    const torch::nn::Module& model);
Record ParametersOf(const Oracle& oracle);

// Of a record: a loss; a parameter; buffers and the generator's state.
std::string LossLine(int step, int micro_batch, const at::Tensor& loss);
std::string ParameterLine(const std::string& name, const at::Tensor& value);
void AddState(const torch::nn::Module& module, const at::Tensor& generator,
              Record* record);

// "" if equal; else the first line that differs, both ways.
std::string FirstDifference(const Record& expected, const Record& got);
std::string ToText(const Record& record);
Record RecordFromText(absl::string_view text);

// Sizes, dtype and fingerprint; "none" for an undefined tensor.
std::string PrintOf(const at::Tensor& tensor);

}  // namespace tessera
#endif  // TESTS_TRAINING_H_
