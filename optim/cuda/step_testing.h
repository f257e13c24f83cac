// What one step works on, in tensors, for tests of kernels.
#ifndef OPTIM_CUDA_STEP_TESTING_H_
#define OPTIM_CUDA_STEP_TESTING_H_

#include <cstdint>
#include <vector>

#include "optim/algorithms/coefficients.h"
#include "optim/kernels/element_step.h"
#include "torch/torch.h"

namespace tessera {

inline at::ScalarType TensorTypeOf(NumberType type) {
  switch (type) {
    case NumberType::kFloat64:
      return at::kDouble;
    case NumberType::kBFloat16:
      return at::kBFloat16;
    case NumberType::kFloat16:
      return at::kHalf;
    case NumberType::kBlock8:
      return at::kByte;
    case NumberType::kRemainder:
      return at::kShort;
    default:
      return at::kFloat;
  }
}

struct StepTypes {
  NumberType working = NumberType::kNone;
  NumberType states = NumberType::kFloat32;
  NumberType gradient = NumberType::kFloat32;
  NumberType master = NumberType::kFloat32;
};

struct StepOperands {
  // [numel] each, on the CPU: what cannot be negative is not; a working copy of
  // zeros, or of values beside remainders, which are any bits; states of 8 bits
  // are zeros. `values`: float32 [numel] of them.
  template <typename Values>
  StepOperands(Formula formula, int64_t numel, const StepTypes& types,
               const Values& values)
      : types(types),
        master(values(numel).to(TensorTypeOf(AverageType(types.master)))),
        gradient(values(numel).to(TensorTypeOf(types.gradient))),
        working(torch::zeros({numel}, TensorTypeOf(types.working))) {
    if (types.master == NumberType::kRemainder) {
      master = values(numel).view(at::kInt).to(at::kShort);
      working = values(numel).to(at::kBFloat16);
    }
    const StepStates names = StatesOf(formula);
    for (int s = 0; s < names.count; ++s) {
      if (types.states == NumberType::kBlock8) {
        states.push_back(
            torch::zeros({BytesOf(types.states, numel)}, at::kByte));
        continue;
      }
      const at::Tensor any = values(numel);
      states.push_back((names.states[s].non_negative ? any.abs() : any)
                           .to(TensorTypeOf(types.states)));
    }
  }
  StepOperands To(c10::Device device) const {
    StepOperands other = *this;
    for (at::Tensor* t : other.All()) {
      *t = t->to(device, /*non_blocking=*/false, /*copy=*/true);
    }
    return other;
  }
  // All of it, in one order.
  std::vector<at::Tensor*> All() {
    std::vector<at::Tensor*> all = {&master, &gradient, &working};
    for (at::Tensor& state : states) all.push_back(&state);
    return all;
  }
  StepRange Range() const {
    StepRange r;
    r.master = master.mutable_data_ptr();
    for (size_t s = 0; s < states.size(); ++s) {
      r.states[s] = states[s].mutable_data_ptr();
    }
    r.gradient = gradient.const_data_ptr();
    r.numel = master.numel();
    r.master_type = types.master;
    r.state_type = types.states;
    r.gradient_type = types.gradient;
    r.working_type = types.working;
    if (types.working != NumberType::kNone) {
      r.working = working.mutable_data_ptr();
    }
    return r;
  }
  StepTypes types;
  at::Tensor master, gradient, working;
  std::vector<at::Tensor> states;
};

}  // namespace tessera
#endif  // OPTIM_CUDA_STEP_TESTING_H_
