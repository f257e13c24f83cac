// Verify: a proof on the user's own model that sharded training is plain
// training.
//
//   const auto report = tessera::Verify(
//       [] { return std::make_shared<Gpt>(options); }, "zero3.json",
//       [&](torch::nn::Module& model, int rank, int64_t micro_batch) {
//         return dynamic_cast<Gpt&>(model).Loss(data.Batch(rank, micro_batch));
//       });
//   if (!report.ok()) ...  // "step 1: gradient of 'block0.fc.weight' ..."
//
// Trains the model for some steps with an engine, over all ranks, and on rank 0
// again with plain libtorch, all ranks' micro-batches one after the other
// (verify/oracle.h). After each step losses, gradients, norm, masters and
// working copies must be the same bits; at the end buffers and the state of the
// generators.
//
// Where a backend adds in an order of its own, gradients must lie within the
// bound of that; the steps that follow are the engine's, and the next forward
// starts from the same bits again.
#ifndef VERIFY_VERIFY_H_
#define VERIFY_VERIFY_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/engine.h"
#include "verify/oracle.h"

namespace tessera {

namespace proto {
class Config;
}

struct VerifyOptions {
  int steps = 3;  // of the optimizer
  // Seeds the default generator before each module is made, and that of rank r
  // with seed + 1 + r thereafter.
  uint64_t seed = 0;
  // As for Engine::Create; communicator and sync_from_rank0 mean the same here.
  EngineOptions engine;
  // Gradients must be the same bits, not only within the bound of sums in
  // another order. Unset: where sums are in the order of the ranks, that is,
  // except over nccl with WorldOptions::ordered_sums off.
  std::optional<bool> exact;
  // BackwardOptions::weight of a rank's micro-batch, if set.
  std::function<double(int rank, int64_t micro_batch)> weight;
};

struct VerifyReport {
  int steps = 0;
  int64_t parameters = 0;
  int64_t values = 0;  // compared, over all steps
  bool exact = true;   // gradients too; else within bounds
  // "3 steps, 12 parameters, 5184 values: the same bits".
  std::string ToString() const;
};

// `make` builds the model, the same whenever it is called after the same seed;
// rank 0 calls it alone, too, so it is plain (no ConstructSharded).
// `loss` is a rank's loss of its micro-batch, numbered from 0, and depends on
// nothing else: rank 0 asks for those of all ranks. With torch_autocast it runs
// under autocast. Predicates of EngineOptions::param_groups say the same of a
// parameter whenever they are asked. Rank 0 holds W whole models besides.
// COLLECTIVE.
//
// Errors, on all ranks: DataLoss naming what differs first: step, parameter or
// buffer, its unit, element, both values, rank; Unimplemented naming a key of
// the configuration that plain training here does not know (optimizer.type
// Custom, sharding.ignored_parameters, precision.fp32_classes,
// sharding.buffer_sync, scheduler.params.cycle_momentum, a state_dtype of 8
// bits), or of EngineOptions::param_groups (use_muon, ema_decay); those of
// Engine::Create, Backward, Step and of `loss`. The config needs an optimizer.
absl::StatusOr<VerifyReport> Verify(const Oracle::MakeModule& make,
                                    absl::string_view config_path,
                                    const Oracle::Loss& loss,
                                    const VerifyOptions& options = {});
absl::StatusOr<VerifyReport> Verify(const Oracle::MakeModule& make,
                                    const proto::Config& config,
                                    const Oracle::Loss& loss,
                                    const VerifyOptions& options = {});

}  // namespace tessera
#endif  // VERIFY_VERIFY_H_
