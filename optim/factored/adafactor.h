// Adafactor: the direction, of parameters that shards cut anywhere. With G the
// gradient times its factor, [..., R, C], w = step^beta2_decay:
//
//   row_var    row_var + w * (mean of G^2 over a row - row_var)
//   col_var    the same over a column
//   V          row_var / max(mean of row_var over the rows, eps) * col_var
//   direction  G / sqrt(max(V, eps^2))
//
// and where there are fewer than two dims V is variance, the same of each
// element's G^2. Means are those of optim/factored/line_sums.h, and states are
// worked out in float64 and rounded, V and direction in the masters' dtype,
// each operation rounded once. So the bits depend on no shard.
//
// The descent along it (optim/formulas/directed_formulas.h) is by
//
//   min(lr, 1 / sqrt(step)) * max(eps2, RMS of the master)
//   / max(1, RMS of the direction / d)
//
// Source: Shazeer & Stern, "Adafactor: Adaptive Learning Rates with Sublinear
// Memory Cost", 2018, as torch.optim.Adafactor has it.
#ifndef OPTIM_FACTORED_ADAFACTOR_H_
#define OPTIM_FACTORED_ADAFACTOR_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "comm/communicator.h"
#include "optim/algorithms/optimizer_options.h"
#include "optim/factored/factored_states.h"
#include "optim/factored/line_sums.h"
#include "sharding/flat/flat_parameter.h"

namespace tessera {

// One step of the units of a shard group: call Add for each, FindMeans, Direct
// for each.
class AdafactorStep {
 public:
  // `skip`: one number on a device that says whether states stay as they are;
  // undefined: they do not.
  explicit AdafactorStep(at::Tensor skip) : skip_(std::move(skip)) {}

  struct Parameter {
    const OptimizerOptions* options = nullptr;  // borrowed
    int64_t step = 1;                           // this one
    bool has_gradient = false;
  };
  // Adds a unit. `gradient`: [owned], in the masters' dtype, multiplied by its
  // factor; Direct replaces it by the direction. `parameters`: the unit's.
  // Borrows `flat` and `states`. LOCAL, ASYNC on devices. Throws c10::Error.
  void Add(const FlatParameter& flat, at::Tensor gradient,
           const FactoredStates& states,
           const std::vector<Parameter>& parameters);
  // Computes the means of all lines of all units, by two all-reduces of
  // float64: one number per line, then two. COLLECTIVE, blocking.
  absl::Status FindMeans();
  // Updates the states of the unit that was added as number `unit`, and
  // computes its direction. LOCAL, ASYNC on devices. Throws c10::Error.
  void Direct(size_t unit);

 private:
  // The work for one parameter with a gradient: rows, and columns if it has
  // any.
  struct Work {
    Parameter parameter;
    at::Tensor part;  // this rank's of the gradient, in memory's order
    Range run;        // from the parameter's first element
    std::vector<int64_t> sizes, strides;
    std::vector<at::Tensor> states;
    std::vector<Range> lines;  // of each state, in all lines
    bool factored() const { return states.size() > 1; }
  };
  template <typename Visit>
  void VisitBoxes(const Work& work, const Visit& visit) const;
  at::Tensor LinesOf(const at::Tensor& all, const Work& work, size_t s) const;
  void UpdateStates(const Work& work) const;

  const at::Tensor skip_;
  Communicator* comm_ = nullptr;
  bool sharded_ = false;
  at::Device device_ = at::kCPU;
  std::vector<std::vector<Work>> units_;
  std::vector<int64_t> digits_;  // of lines, as many as ...
  std::vector<int64_t> counts_;  // ... these have
  int64_t num_lines_ = 0;
  at::Tensor means_;  // [lines]
};

}  // namespace tessera
#endif  // OPTIM_FACTORED_ADAFACTOR_H_
