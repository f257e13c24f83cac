// Trainee is a test model and its engine on one rank, for tests that make the
// engine's calls one by one, and compare the result.
#ifndef TESTS_SUPPORT_TRAINEE_H_
#define TESTS_SUPPORT_TRAINEE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "comm/communicator.h"
#include "engine/api/engine_types.h"
#include "engine/engine.h"
#include "tests/models/models.h"
#include "tests/support/training.h"
#include "tests/support/training_spec.h"
#include "verify/oracle.h"

namespace tessera {

struct Trainee {
  // COLLECTIVE. The second form takes a configuration that a TrainingSpec
  // cannot express.
  static absl::StatusOr<Trainee> Make(const TrainingSpec& spec,
                                      std::shared_ptr<Communicator> comm);
  static absl::StatusOr<Trainee> Make(std::shared_ptr<TestModel> model,
                                      const proto::Config& config,
                                      std::shared_ptr<Communicator> comm);
  static absl::StatusOr<Trainee> Make(std::shared_ptr<TestModel> model,
                                      const proto::Config& config,
                                      EngineOptions options);

  at::Tensor Loss(int64_t micro_batch) {
    return model->Loss(rank, micro_batch);
  }
  absl::Status Backward(int64_t micro_batch, BackwardOptions options = {});
  absl::Status TrainStep(int64_t micro_batch);
  at::Tensor parameter(const std::string& name) const;
  // Ends a scenario: returns the parameters as text, and closes the engine.
  absl::StatusOr<std::string> Finish();

  int rank = 0;  // Engine::data_rank
  std::shared_ptr<TestModel> model;
  std::unique_ptr<Engine> engine;
};

// Returns an error unless `got` has the code `code`.
absl::Status ExpectCode(absl::StatusCode code, const absl::Status& got);

// Runs a rank function on RankPool::Get(world_size) and returns the answers of
// all ranks, errors as text. A hang is an error after the deadline.
std::vector<std::string> RunOnRanks(
    int world_size, absl::string_view function, absl::string_view args,
    absl::Duration deadline = absl::Seconds(40));

// Removes the first line of each text and returns these lines.
std::vector<std::string> TakeFirstLines(std::vector<std::string>* texts);

// Return the loss of the current micro-batch, or of a given one.
Oracle::Loss OwnLoss();
Oracle::Loss LossOf(int64_t micro_batch);

// Expects that all answers are the parameters that the oracle has after these
// steps.
void ExpectParameters(const std::vector<std::string>& answers,
                      const TrainingSpec& spec, int world_size,
                      const std::vector<Oracle::Loss>& steps);
void ExpectParameters(const std::vector<std::string>& answers,
                      const Oracle& oracle);

}  // namespace tessera
#endif  // TESTS_SUPPORT_TRAINEE_H_
