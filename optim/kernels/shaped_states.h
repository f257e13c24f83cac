// Sizes of a formula's states for one parameter, and states that have a shape
// of their own, not the parameter's:
//
//   Adafactor  row_var [..., R, 1] and col_var [..., 1, C] of [..., R, C];
//              variance [...] where there are fewer than two dims
#ifndef OPTIM_KERNELS_SHAPED_STATES_H_
#define OPTIM_KERNELS_SHAPED_STATES_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "optim/algorithms/coefficients.h"
#include "optim/algorithms/optimizer_options.h"
#include "optim/formulas/formulas.h"

namespace tessera {

// Returns the bytes of the states of `numel` elements, beside masters of
// `master_bytes` each; without shaped states.
int64_t StateBytesOf(const OptimizerOptions& options, int64_t master_bytes,
                     int64_t numel);

struct StateShape {
  const char* name;  // as checkpoints call it
  std::vector<int64_t> sizes;
  int64_t numel() const;
};

bool HasShapedStates(Formula formula);
// Returns a formula's shaped states; empty if it has none.
std::vector<StateShape> ShapedStatesOf(Formula formula,
                                       absl::Span<const int64_t> sizes);
// Returns the number of elements of all shaped states.
int64_t ShapedNumel(Formula formula, absl::Span<const int64_t> sizes);
// Returns ShapedNumel summed over parameters, each with a `tensor`.
template <typename Parameters>
int64_t ShapedNumelOf(Formula formula, const Parameters& parameters) {
  int64_t numel = 0;
  for (const auto& p : parameters) {
    numel += ShapedNumel(formula, p.tensor.sizes());
  }
  return numel;
}

}  // namespace tessera
#endif  // OPTIM_KERNELS_SHAPED_STATES_H_
