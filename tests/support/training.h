// Runs a training of a test model, by the engine on this rank or by the oracle
// for all ranks, and records its results as lines of text that must be equal.
//
//   step 2, micro-batch 0: loss 0x1.8p+0
//   step 2: gradient of out.bias 5 float 0123456789abcdef
//   step 2: scale 0x1p+16, norm 0x1.8p+0
//   step 3: skipped, scale 0x1p+16
//   parameter out.bias 5 float fedcba9876543210
//   buffer norm1.running_mean ...
//   generator ...
#ifndef TESTS_SUPPORT_TRAINING_H_
#define TESTS_SUPPORT_TRAINING_H_

#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "comm/communicator.h"
#include "engine/engine.h"
#include "tests/models/models.h"
#include "tests/support/training_spec.h"
#include "verify/oracle.h"

namespace tessera {

using Record = std::vector<std::string>;

// Returns the parameters that TrainingSpec::tensor ranks divide, and the
// dimension of each that is cut, perhaps in groups: any will do.
std::vector<TensorCut> TensorCutsOf(const torch::nn::Module& module,
                                    const TrainingSpec& spec);

// Builds the model as every rank does; then the default generator is the
// rank's.
std::shared_ptr<TestModel> BuildModel(absl::string_view name, int rank);

// Builds the model by ConstructSharded. COLLECTIVE.
absl::StatusOr<std::shared_ptr<TestModel>> ConstructModel(
    absl::string_view name, int64_t budget, std::shared_ptr<Communicator> comm);

// Call it before anything is made for TrainingSpec::device. On a device without
// hardware it makes random numbers those of the oracle, which come from the
// CPU's generator.
void PrepareDevice(const TrainingSpec& spec, int rank);
// Returns the communicator to train with: on a device without hardware the
// collectives of devices, except for "host"; otherwise `comm`, whose
// collectives run on the host, with copies. COLLECTIVE.
absl::StatusOr<std::shared_ptr<Communicator>> CommunicatorOf(
    const TrainingSpec& spec, std::shared_ptr<Communicator> comm);
// Returns an error if the device was given something out of order so far.
absl::Status CheckFaults(const TrainingSpec& spec);

// COLLECTIVE.
absl::StatusOr<std::unique_ptr<Engine>> MakeEngine(
    std::shared_ptr<torch::nn::Module> model, const TrainingSpec& spec,
    std::shared_ptr<Communicator> comm);

// Record the two parts: steps [first, spec.steps), and the state after them.
// COLLECTIVE.
absl::Status TrainSteps(Engine& engine, TestModel& model,
                        const TrainingSpec& spec, int rank, int first,
                        Record* record);
absl::Status AddFinalState(Engine& engine, const TestModel& model,
                           Record* record);

// Does both, from the start. COLLECTIVE. The model is closed and plain at the
// end.
absl::StatusOr<Record> TrainWithEngine(const TrainingSpec& spec,
                                       std::shared_ptr<Communicator> comm);
// Returns the records of all ranks. Runs with the same result are trained once
// per process.
const std::vector<Record>& TrainWithOracle(const TrainingSpec& spec,
                                           int world_size);
// Trains `spec` on ranks of RankPool::Get(world_size) and by the oracle here,
// and expects equal records.
void ExpectEqualsOracle(const TrainingSpec& spec, int world_size);

// Return the lines of parameters alone. The first is COLLECTIVE.
absl::StatusOr<Record> ParametersOf(Engine& engine,
                                    const torch::nn::Module& model);
Record ParametersOf(const Oracle& oracle);

// Write parts of a record: a loss; a parameter; buffers and the generator's
// state.
std::string LossLine(int step, int micro_batch, const at::Tensor& loss);
std::string ParameterLine(const std::string& name, const at::Tensor& value);
void AddState(const torch::nn::Module& module, const at::Tensor& generator,
              Record* record);

// Returns "" if equal, otherwise the first line that differs, from both.
std::string FirstDifference(const Record& expected, const Record& got);
std::string ToText(const Record& record);
Record RecordFromText(absl::string_view text);

// Returns sizes, dtype and fingerprint; "none" for an undefined tensor.
std::string PrintOf(const at::Tensor& tensor);

}  // namespace tessera
#endif  // TESTS_SUPPORT_TRAINING_H_
