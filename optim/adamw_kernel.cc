#include "optim/adamw_kernel.h"

#include <cmath>

namespace tessera {

#define TESSERA_ADAMW_DECLARE(isa)                            \
  namespace adamw_##isa {                                     \
    void Update(const AdamWRange&, const AdamWCoefficients&); \
  }
TESSERA_ADAMW_DECLARE(portable)
TESSERA_ADAMW_DECLARE(avx2)
TESSERA_ADAMW_DECLARE(avx512)
#undef TESSERA_ADAMW_DECLARE

AdamWCoefficients CoefficientsOf(const AdamWOptions& o, int64_t step,
                                 double gradient_factor) {
  const auto steps = static_cast<double>(step);
  const double correction1 = 1 - std::pow(o.beta1, steps);
  const double correction2 = 1 - std::pow(o.beta2, steps);
  AdamWCoefficients c;
  if (o.weight_decay != 0) {
    c.decay = static_cast<float>(1 - o.lr * o.weight_decay);
  }
  c.exp_avg_weight = static_cast<float>(1 - o.beta1);
  c.beta2 = static_cast<float>(o.beta2);
  c.exp_avg_sq_weight = static_cast<float>(1 - o.beta2);
  c.bias_correction2_sqrt = static_cast<float>(std::sqrt(correction2));
  c.eps = static_cast<float>(o.eps);
  c.minus_step_size = static_cast<float>(-(o.lr / correction1));
  c.gradient_factor = static_cast<float>(gradient_factor);
  return c;
}

void AdamWUpdate(const AdamWRange& range, const AdamWCoefficients& coefficients,
                 Isa isa) {
  switch (isa) {
    case Isa::kPortable:
      return adamw_portable::Update(range, coefficients);
    case Isa::kAvx2:
      return adamw_avx2::Update(range, coefficients);
    case Isa::kAvx512:
      return adamw_avx512::Update(range, coefficients);
  }
}

AdamWRange Part(const AdamWRange& range, int64_t begin, int64_t end) {
  AdamWRange part = range;
  part.master += begin;
  part.exp_avg += begin;
  part.exp_avg_sq += begin;
  part.gradient += begin;
  part.numel = end - begin;
  if (range.new_master != nullptr) part.new_master += begin;
  if (range.working_type != WorkingType::kNone) {
    const int64_t item = range.working_type == WorkingType::kFloat32 ? 4 : 2;
    part.working = static_cast<char*>(range.working) + begin * item;
  }
  return part;
}

}  // namespace tessera
