// DirectedStep: steps in which the change of an element depends on its whole
// parameter, although shards cut it:
//
//   direction  on the shards, element by element, in place of the gradient
//              (optim/formulas/directed_formulas.h)
//   completed  LAMB: the norms of each parameter and its direction, in exact
//              sums (optim/norm/grad_norm.h), give its trust ratio
//              Muon: matrices are gathered, made orthogonal, each by one rank,
//              and their parts go back to the shards
//              Adafactor: the same norms give the size of the change; its
//              direction is of means over rows and columns
//              (optim/factored/adafactor.h)
//   descent    on the shards, element by element
//
// So the bits are those of whole parameters, at every stage and world size.
//
// Sources: You et al., "Large Batch Optimization for Deep Learning", 2020
// (LAMB); Jordan, "Muon", 2024, of which DeepSpeed gathers gradients and
// PyTorch leaves the work to every rank.
#ifndef OPTIM_DIRECTED_STEP_H_
#define OPTIM_DIRECTED_STEP_H_

#include <deque>
#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "comm/communicator.h"
#include "optim/algorithms/optimizer_options.h"
#include "optim/norm/grad_norm.h"
#include "optim/unit_step.h"
#include "sharding/flat/flat_parameter.h"

namespace tessera {

// A unit whose direction has been found.
struct DirectedUnit {
  FlatParameter* flat = nullptr;
  HasGradient has_gradient;
  at::Tensor direction;  // [owned], of the master dtype, or as completed
};

// The completed directions of the parameters of a unit.
struct Completion {
  std::vector<double> scales;  // of the rate, by parameter of the unit
  // Replaces the unit's direction, [owned], in its dtype or in 16 bits, which
  // kernels of float32 masters can also read; undefined: the unit's is used.
  at::Tensor direction;
};

// Adds to `sums`, for LAMB and Adafactor, the exact sums of squares of each
// parameter's masters and direction in this rank's shard. LOCAL.
void AddTrustSums(const DirectedUnit& unit, const at::Tensor& masters,
                  std::vector<NormSum>* sums);
// Computes the scales of units (DirectedRow::scale) from their sums over the
// shard group. `options`: by group; `group_of`: by parameter of the model.
// LOCAL.
std::vector<Completion> TrustRatios(
    absl::Span<const DirectedUnit> units, const std::vector<NormSum>& sums,
    const std::vector<OptimizerOptions>& options,
    const std::vector<int>& group_of);

// Orthogonalizer: distributes the matrices of a step of Muon over the ranks of
// a shard group, in order, each to the rank with the least work so far.
class Orthogonalizer {
 public:
  // `options`, `group_of`: by parameter of the model; borrowed.
  Orthogonalizer(const std::vector<OptimizerOptions>& options,
                 const std::vector<int>& group_of)
      : options_(options), group_of_(group_of) {}

  // Begins to gather a unit's direction. COLLECTIVE, ASYNC. ResourceExhausted.
  absl::Status Start(const DirectedUnit& unit);
  // Computes this rank's matrices of the first started unit that has not been
  // computed, and begins to send their parts to the owners. COLLECTIVE; the
  // sends are ASYNC, and on a device all of it is.
  absl::Status Compute();
  // Finishes the unit that was computed first and returns its direction.
  // COLLECTIVE.
  absl::StatusOr<Completion> Finish();

 private:
  struct InFlight {
    DirectedUnit unit;
    at::Tensor whole, part;  // [P], [owned], in few bits
    CommFuture arrives;
    std::vector<int> worker;  // of each parameter of the unit
  };
  const OptimizerOptions& OptionsOf(const DirectedUnit& unit, size_t i) const;
  absl::Status ComputeMatrices(InFlight* in_flight);

  const std::vector<OptimizerOptions>& options_;
  const std::vector<int>& group_of_;
  std::vector<double> load_;  // of each rank, so far
  std::deque<InFlight> started_, computed_;
};

}  // namespace tessera
#endif  // OPTIM_DIRECTED_STEP_H_
