// One conformance suite for c10d backends: every operation, dtype, reduction,
// size and layout against a local reference, to the bit.
//
//   cell   operation x dtype x reduction x layout, at every size
//
// A backend may refuse a cell (throw); it may not give other bits, and it may
// not refuse some sizes only.
#ifndef TESTS_CONFORMANCE_H_
#define TESTS_CONFORMANCE_H_

#include <set>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"

namespace tessera {

enum class ConformanceValues {
  // Sums and products of them are exact in every order and dtype.
  kExact,
  // Sums round: only those in rank order have the reference's bits.
  kRounding,
};

// What a backend is not asked at all, for it would hang or end the process.
struct ConformanceLimits {
  c10::Device device = at::kCPU;  // where its tensors are
  bool strided = true;            // tensors that are not contiguous
  bool empty_from_any = true;     // empty messages from any rank
};

struct ConformanceCase {
  std::string op;
  at::ScalarType dtype = at::kFloat;
  c10d::ReduceOp::RedOpType reduce = c10d::ReduceOp::UNUSED;
  bool contiguous = true;
  int64_t numel = 0;
  ConformanceValues values = ConformanceValues::kExact;
  c10::Device device = at::kCPU;
  // "all_reduce float32 sum strided"
  std::string Cell() const;
};

struct ConformanceReport {
  int64_t passed = 0;  // cases
  std::set<std::string> refused_cells, wrong_cells;
  std::vector<std::string> failures;  // the first few, said in full
};

// Of rounding values, those of reductions only.
std::vector<ConformanceCase> ConformanceCells(ConformanceValues values,
                                              ConformanceLimits limits = {});

// All cells at all sizes: 0, 1, W - 1, W + 1, a prime and 1 MiB and one
// element more. COLLECTIVE.
ConformanceReport RunConformance(c10d::Backend& backend,
                                 ConformanceValues values,
                                 ConformanceLimits limits = {});
// One case; "" if it passed. Throws what the backend throws. COLLECTIVE.
std::string RunConformanceCase(c10d::Backend& backend,
                               const ConformanceCase& one);

}  // namespace tessera
#endif  // TESTS_CONFORMANCE_H_
