#include "tests/conformance.h"

#include "absl/strings/str_cat.h"
#include "tests/conformance_internal.h"
#include "torch/torch.h"

namespace tessera {

using c10d::ReduceOp;
using conformance::Case;
using conformance::Op;

std::string ConformanceCase::Cell() const {
  static constexpr const char* kReduce[] = {"sum", "avg", "product", "min",
                                            "max"};
  return absl::StrCat(op, " ", c10::toString(dtype),
                      reduce <= ReduceOp::MAX
                          ? absl::StrCat(" ", kReduce[static_cast<int>(reduce)])
                          : "",
                      contiguous ? "" : " strided");
}

namespace {

bool Exists(const Op& op, const Case& cell) {
  if (cell.op == "barrier" && cell.dtype != at::kFloat) return false;
  if (!op.reduces) {
    return cell.reduce == ReduceOp::UNUSED &&
           cell.values == ConformanceValues::kExact;
  }
  // Complex numbers have no order, and c10d no product of them.
  return cell.reduce != ReduceOp::UNUSED &&
         (!at::isComplexType(cell.dtype) || cell.reduce == ReduceOp::SUM ||
          cell.reduce == ReduceOp::AVG);
}

}  // namespace

std::vector<ConformanceCase> ConformanceCells(ConformanceValues values,
                                              ConformanceLimits limits) {
  std::vector<at::ScalarType> dtypes = {at::kFloat, at::kDouble, at::kHalf,
                                        at::kBFloat16, at::kComplexFloat};
  if (values == ConformanceValues::kExact) {
    for (at::ScalarType type :
         {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong}) {
      dtypes.push_back(type);
    }
  }
  constexpr ReduceOp::RedOpType kReduces[] = {
      ReduceOp::UNUSED, ReduceOp::SUM, ReduceOp::AVG,
      ReduceOp::MIN,    ReduceOp::MAX, ReduceOp::PRODUCT};
  std::vector<Case> cells;
  // Operations last: they share their values.
  for (at::ScalarType dtype : dtypes) {
    for (ReduceOp::RedOpType reduce : kReduces) {
      for (const Op& op : conformance::Ops()) {
        for (bool contiguous : {true, false}) {
          const Case cell = {op.name, dtype,  reduce,       contiguous,
                             0,       values, limits.device};
          if (Exists(op, cell) && (contiguous || limits.strided)) {
            cells.push_back(cell);
          }
        }
      }
    }
  }
  return cells;
}

ConformanceReport RunConformance(c10d::Backend& backend,
                                 ConformanceValues values,
                                 ConformanceLimits limits) {
  constexpr int64_t kPrime = 10007, kMiB = 1 << 20;
  constexpr size_t kToldInFull = 5;
  const int64_t size = backend.getSize();
  ConformanceReport report;
  for (Case cell : ConformanceCells(values, limits)) {
    const int64_t big = kMiB / c10::elementSize(cell.dtype) + 1;
    std::set<int64_t> sizes = {1, 0, size - 1, size + 1, kPrime, big};
    if (cell.op == "receive_any_source" && !limits.empty_from_any) {
      sizes.erase(0);
    }
    size_t refused = 0;
    std::string said;
    for (int64_t numel : sizes) {
      cell.numel = numel;
      std::string wrong;
      try {
        wrong = RunConformanceCase(backend, cell);
      } catch (const std::exception& error) {
        ++refused;
        said = error.what();
        continue;
      }
      if (wrong.empty()) {
        ++report.passed;
        continue;
      }
      report.wrong_cells.insert(cell.Cell());
      if (report.failures.size() >= kToldInFull) continue;
      report.failures.push_back(
          absl::StrCat(cell.Cell(), ", ", numel, " elements: ", wrong));
    }
    if (refused == sizes.size()) {
      report.refused_cells.insert(cell.Cell());
    } else if (refused > 0) {
      report.wrong_cells.insert(cell.Cell());
      report.failures.push_back(absl::StrCat(cell.Cell(), ": refused at ",
                                             refused, " of ", sizes.size(),
                                             " sizes: ", said));
    }
  }
  return report;
}

}  // namespace tessera
