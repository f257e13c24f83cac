// Says in words where two results differ.
#ifndef VERIFY_DIFFERENCE_H_
#define VERIFY_DIFFERENCE_H_

#include <cstdint>
#include <string>

#include "ATen/core/Tensor.h"
#include "absl/strings/string_view.h"

namespace tessera {

// Returns "" if both have the same bits (or are undefined; all NaNs count as
// equal). Otherwise it returns the first element that differs, in order of
// indices, both values, and how many elements differ.
std::string DifferenceOf(const at::Tensor& expected, const at::Tensor& got);

// Returns "" if each element is within `additions` times its `rounding`: two
// orders of n additions differ by at most 2 (n - 1) u times the sum of the
// absolute values, u half of the dtype's epsilon (Higham, 2002, section 4.2).
std::string DifferenceBeyond(const at::Tensor& expected, const at::Tensor& got,
                             const at::Tensor& rounding, int64_t additions);

// Returns dtype, sizes and a fingerprint.
std::string PrintOfValues(const at::Tensor& tensor);

// Returns "" if equal, otherwise "expected <line>, got <line>".
std::string FirstLineThatDiffers(absl::string_view expected,
                                 absl::string_view got);

}  // namespace tessera
#endif  // VERIFY_DIFFERENCE_H_
