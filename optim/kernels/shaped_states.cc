#include "optim/kernels/shaped_states.h"

#include <utility>

#include "optim/kernels/element_step.h"

namespace tessera {

int64_t StateShape::numel() const {
  int64_t numel = 1;
  for (const int64_t size : sizes) numel *= size;
  return numel;
}

bool HasShapedStates(Formula formula) {
  return formula == Formula::kAdafactorDirection;
}

std::vector<StateShape> ShapedStatesOf(Formula formula,
                                       absl::Span<const int64_t> sizes) {
  if (!HasShapedStates(formula)) return {};
  const std::vector<int64_t> all(sizes.begin(), sizes.end());
  if (all.size() < 2) return {{"variance", all}};
  std::vector<int64_t> rows = all, columns = all;
  rows[all.size() - 1] = 1;
  columns[all.size() - 2] = 1;
  return {{"row_var", std::move(rows)}, {"col_var", std::move(columns)}};
}

int64_t StateBytesOf(const OptimizerOptions& o, int64_t master_bytes,
                     int64_t numel) {
  const int64_t count = StateCountOf(o);
  const int64_t average = o.ema_decay > 0 ? master_bytes * numel : 0;
  if (master_bytes != 4) return count * master_bytes * numel + average;
  switch (o.states) {
    case StateType::kFloat32:
      return average + count * BytesOf(NumberType::kFloat32, numel);
    case StateType::kBFloat16:
      return average + count * BytesOf(NumberType::kBFloat16, numel);
    case StateType::kBlock8:
      return average + count * BytesOf(NumberType::kBlock8, numel);
  }
}

int64_t ShapedNumel(Formula formula, absl::Span<const int64_t> sizes) {
  int64_t numel = 0;
  for (const StateShape& shape : ShapedStatesOf(formula, sizes)) {
    numel += shape.numel();
  }
  return numel;
}

}  // namespace tessera
