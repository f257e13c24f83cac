// The AdamW kernel and the triad as C functions, for programs that measure them
// beside others in one process (optimizers_peer.py). No libtorch: theirs is
// loaded.
#include <memory>

#include "benchmarks/triad.h"
#include "benchmarks/workers.h"
#include "optim/kernels/element_step.h"

namespace tessera {
namespace {

// Of the last call that asked for another number. Calls come from one thread.
Workers& WorkersOf(int threads) {
  static std::unique_ptr<Workers> workers;
  if (workers == nullptr || workers->count() != threads) {
    workers = std::make_unique<Workers>(threads);
  }
  return *workers;
}

}  // namespace
}  // namespace tessera

extern "C" {

// [numel] each. `working_type`: a tessera::NumberType, of what `working`
// points to.
void tessera_adamw(float* master, float* exp_avg, float* exp_avg_sq,
                   const float* gradient, int working_type, void* working,
                   int64_t numel, double lr, double beta1, double beta2,
                   double eps, double weight_decay, int64_t step, int threads) {
  tessera::StepRange range;
  range.master = master;
  range.states[0] = exp_avg;
  range.states[1] = exp_avg_sq;
  range.gradient = gradient;
  range.numel = numel;
  range.working_type = static_cast<tessera::NumberType>(working_type);
  range.working = working;
  const auto coefficients =
      tessera::CoefficientsOf({lr, beta1, beta2, eps, weight_decay}, step);
  tessera::WorkersOf(threads).Run(numel, [&](int64_t begin, int64_t end) {
    tessera::StepElements(tessera::Formula::kAdamW,
                          tessera::Part(range, begin, end), coefficients);
  });
}

void tessera_triad(float* a, const float* b, const float* c, float s,
                   int64_t numel, int threads) {
  tessera::WorkersOf(threads).Run(numel, [&](int64_t begin, int64_t end) {
    tessera::Triad(a + begin, b + begin, c + begin, s, end - begin);
  });
}

const char* tessera_isa() { return tessera::IsaName(tessera::BestIsa()); }

}  // extern "C"
