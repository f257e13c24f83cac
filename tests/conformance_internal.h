// What the files of the conformance suite share.
#ifndef TESTS_CONFORMANCE_INTERNAL_H_
#define TESTS_CONFORMANCE_INTERNAL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/types/span.h"
#include "tests/conformance.h"

namespace tessera::conformance {

using Case = ConformanceCase;
using c10d::ReduceOp;
using Tensors = std::vector<at::Tensor>;

// ---- conformance_values.cc

// What rank `rank` contributes: `numel` elements, not to be written; `salt`
// tells its tensors apart. Kept while the dtype and the kind of values stay.
at::Tensor ValuesOf(const Case& one, int rank, int64_t numel, int salt = 0);
// In rank order; 16-bit types in float32, rounded once.
at::Tensor Reduced(const Case& one, const Tensors& in);

// Tensors of the layout that is asked for: zeros, and these values.
at::Tensor Empty(const Case& one, int64_t numel);
at::Tensor Place(const Case& one, const at::Tensor& values);

// What was wrong, "" if nothing was.
std::string Compare(const at::Tensor& got, const at::Tensor& want,
                    const std::string& where = "output");
std::string CompareAll(const Tensors& got, const Tensors& want);

// ---- conformance_ops.cc

struct Setting;  // a backend and a case

struct Op {
  const char* name;
  // What was wrong, "" if nothing was. COLLECTIVE.
  std::string (*run)(const Setting&);
  bool reduces = false;
};
absl::Span<const Op> Ops();

}  // namespace tessera::conformance
#endif  // TESTS_CONFORMANCE_INTERNAL_H_
