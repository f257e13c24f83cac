// Verify proves on the user's own model that sharded training equals plain
// training.
//
//   const auto report = tessera::Verify(
//       [] { return std::make_shared<Gpt>(options); }, "zero3.json",
//       [&](torch::nn::Module& model, int rank, int64_t micro_batch) {
//         return dynamic_cast<Gpt&>(model).Loss(data.Batch(rank, micro_batch));
//       });
//   if (!report.ok()) ...  // "step 1: gradient of 'block0.fc.weight' ..."
//
// It trains the model for some steps with an engine, over all ranks, and again
// on rank 0 with plain libtorch, all ranks' micro-batches one after the other
// (verify/oracle.h). After each step losses, gradients, norm, masters and
// working copies must have the same bits; at the end, also buffers and the
// state of the generators.
//
// Where a backend adds in an order of its own, gradients must lie within the
// bound for that. The steps that follow use the engine's gradients, so that the
// next forward starts from the same bits again.
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
  // Seeds the default generator with this before each module is made, and that
  // of rank r with seed + 1 + r thereafter.
  uint64_t seed = 0;
  // Options for Engine::Create; communicator and sync_from_rank0 apply to
  // Verify, too.
  EngineOptions engine;
  // Whether gradients must have the same bits, instead of lying within the
  // bound of sums in another order. Unset: where sums are in the order of the
  // ranks, that is, except over nccl with WorldOptions::ordered_sums off.
  std::optional<bool> exact;
  // BackwardOptions::weight of a rank's micro-batch, if set.
  std::function<double(int rank, int64_t micro_batch)> weight;
};

struct VerifyReport {
  int steps = 0;
  int64_t parameters = 0;
  int64_t values = 0;  // compared, over all steps
  bool exact = true;   // gradients too; else within bounds
  // Returns "3 steps, 12 parameters, 5184 values: the same bits".
  std::string ToString() const;
};

// With tensor_parallel or a pipeline a rank, in what follows, is one that has
// samples of its own (Engine::data_rank).
//
// `make` builds the model, and gives the same one after the same seed; rank 0
// also calls it alone, so it is plain (no ConstructSharded). `loss` returns a
// rank's loss of its micro-batch, numbered from 0, and depends on nothing else:
// rank 0 calls it for all ranks. With torch_autocast it runs under autocast.
// Predicates of EngineOptions::param_groups always give the same answer for a
// parameter. Rank 0 also holds W whole models. COLLECTIVE.
//
// Errors, on all ranks: DataLoss naming what differs first: step, parameter or
// buffer, its unit, element, both values, rank; Unimplemented naming a
// configuration key that plain training does not support here (optimizer.type
// Custom, sharding.ignored_parameters, precision.fp32_classes,
// sharding.buffer_sync, scheduler.params.cycle_momentum, a state_dtype of 8
// bits), or an option of EngineOptions::param_groups (use_muon, ema_decay); and
// those of Engine::Create, Backward, Step and of `loss`. The config needs an
// optimizer.
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
