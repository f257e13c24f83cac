// Visits the parts of a step's gradients that lie on this rank, unit by unit,
// for code that looks at gradients, or changes them, before the optimizer.
//
//   flat     [ w1 ..| b1 .| w2 ....|.. ]
//   shard           [ .. w2 part ..]       of each element one rank, also of
//                                          those that all ranks of a
//                                          tensor-parallel group have
//   owned    the shard; below stage 2 all of it
//
// Only parameters that have a gradient in this step are visited. Gradients on
// the host or a disk are in memory for the moment of their unit's visit. LOCAL;
// on devices ASYNC, on the current stream. ResourceExhausted, errors of a disk,
// and what `visit` throws, as an error of `what`; the first ends it. REQUIRES:
// Gradients::Enter.
#ifndef OPTIM_GRADIENTS_OWNED_GRADIENTS_H_
#define OPTIM_GRADIENTS_OWNED_GRADIENTS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/layout/layout.h"
#include "optim/norm/grad_norm.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/gradient/gradients.h"

namespace tessera {

// What this rank has of the gradient of one parameter.
struct GradientPart {
  size_t unit;  // its number among the flats
  const FlatParameter::Parameter& parameter;
  Range elements;     // of the parameter, as real numbers
  at::Tensor values;  // [n]
  int64_t first;      // where it begins in its storage, in elements of `values`
};
using GradientParts = std::vector<GradientPart>;

using ParameterFilter = std::function<bool(const FlatParameter::Parameter&)>;

// Returns which ranks of `comm`, all of the job in its order, have all elements
// of the model together.
RankCopies CopiesOver(const FlatParameter& flat, const Communicator& comm);

// Visits this rank's shards, also where it owns more: so each element counts on
// one rank. `values` are complex where the parameter is. Leaves out units for
// which `skip`, if any, returns true.
absl::Status VisitShards(
    absl::string_view what,
    const std::vector<std::shared_ptr<FlatParameter>>& flats,
    const Gradients& gradients,
    const std::function<void(const FlatGradient&, const GradientParts&)>& visit,
    const std::function<bool(const FlatGradient&)>& skip = nullptr);

// Returns what VisitShards visits of a unit whose step's gradient is `owned`,
// as if all of its parameters had one. Throws c10::Error.
GradientParts ShardsOf(const FlatGradient& gradient, const at::Tensor& owned);

// Visits all that this rank owns of the parameters in `of` (null: of all).
// `values` are real.
absl::Status VisitOwned(
    absl::string_view what,
    const std::vector<std::shared_ptr<FlatParameter>>& flats,
    const ParameterFilter& of, const Gradients& gradients,
    const std::function<absl::Status(const GradientParts&)>& visit);

// As VisitOwned; the optimizer uses what `change` writes.
absl::Status ChangeOwned(
    absl::string_view what,
    const std::vector<std::shared_ptr<FlatParameter>>& flats,
    const ParameterFilter& of, Gradients* gradients,
    const std::function<void(const GradientParts&)>& change);

}  // namespace tessera
#endif  // OPTIM_GRADIENTS_OWNED_GRADIENTS_H_
