// What tests of states and masters of few bits step.
#ifndef OPTIM_KERNELS_STATE_TYPES_TEST_UTIL_H_
#define OPTIM_KERNELS_STATE_TYPES_TEST_UTIL_H_

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

#include "optim/algorithms/coefficients.h"
#include "optim/kernels/element_step.h"

namespace tessera {

inline constexpr Formula kFormula = Formula::kAdamW;

inline std::vector<Isa> Isas() {
  std::vector<Isa> isas = {Isa::kPortable};
  if (BestIsa() >= Isa::kAvx2) isas.push_back(Isa::kAvx2);
  if (BestIsa() >= Isa::kAvx512) isas.push_back(Isa::kAvx512);
  return isas;
}

struct SteppedStates {
  SteppedStates(int64_t numel, NumberType type)
      : type(type),
        master(torch::zeros({numel})),
        states{torch::zeros({BytesOf(type, numel)}, at::kByte),
               torch::zeros({BytesOf(type, numel)}, at::kByte)} {}
  StepRange Range(const at::Tensor& gradient) const {
    StepRange r;
    r.master = master.data_ptr();
    for (int s = 0; s < 2; ++s) r.states[s] = states[s].data_ptr();
    r.gradient = gradient.const_data_ptr();
    r.numel = master.numel();
    r.state_type = type;
    return r;
  }
  std::string Bits() const {
    std::string bits;
    for (const at::Tensor& t : {master, states[0], states[1]}) {
      bits.append(static_cast<const char*>(t.const_data_ptr()), t.nbytes());
    }
    return bits;
  }
  NumberType type;
  at::Tensor master;
  at::Tensor states[2];
};

inline at::Tensor GradientOf(int64_t numel, int step) {
  torch::manual_seed(static_cast<uint64_t>(step));
  return torch::randn({numel}) * torch::logspace(-6, 2, numel);
}

inline void Step(const SteppedStates& memory, int step, Isa isa) {
  const at::Tensor gradient = GradientOf(memory.master.numel(), step);
  StepElements(kFormula, memory.Range(gradient),
               CoefficientsOf({.lr = 1e-2}, step, 1, SeedOf(3, step)), isa);
}

}  // namespace tessera
#endif  // OPTIM_KERNELS_STATE_TYPES_TEST_UTIL_H_
