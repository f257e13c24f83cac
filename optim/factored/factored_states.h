// FactoredStates: a unit's states that have shapes of their own
// (optim/kernels/shaped_states.h), of the masters' dtype on the unit's device.
// A matrix has a row and a column of them, so each rank has them whole, with
// the same bits, and those of vectors, too.
#ifndef OPTIM_FACTORED_FACTORED_STATES_H_
#define OPTIM_FACTORED_FACTORED_STATES_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/layout/flat_buffer.h"
#include "optim/kernels/element_step.h"
#include "sharding/flat/flat_parameter.h"

namespace tessera {

struct ShapedState {
  size_t parameter = 0;  // of the unit
  std::string name;
  at::Tensor values;  // of its own shape, contiguous; REQUIRES: its owner lives
};

class FactoredStates {
 public:
  FactoredStates() = default;
  // Allocates a unit's states as zeros; none if the formula has none. LOCAL.
  // ResourceExhausted.
  static absl::StatusOr<FactoredStates> Allocate(const FlatParameter& flat,
                                                 Formula formula);
  // All states, in the order of parameters.
  const std::vector<ShapedState>& all() const { return all_; }
  // Returns a state's values; undefined if there are none.
  at::Tensor Find(size_t parameter, absl::string_view name) const;
  int64_t bytes() const { return buffer_.bytes(); }

 private:
  FlatBuffer buffer_;
  std::vector<ShapedState> all_;
};

}  // namespace tessera
#endif  // OPTIM_FACTORED_FACTORED_STATES_H_
