// Exports the kernels of steps and the triad as C functions, for programs that
// measure them beside others in one process (optimizers_peer.py). It does not
// link libtorch, since the program loads its own.
#include <memory>
#include <string_view>
#include <utility>

#include "benchmarks/workers.h"
#include "optim/algorithms/coefficients.h"
#include "optim/kernels/element_step.h"

namespace tessera {
namespace {

// Returns workers, made anew when `threads` changes. Calls come from one
// thread.
Workers& WorkersOf(int threads) {
  static std::unique_ptr<Workers> workers;
  if (workers == nullptr || workers->count() != threads) {
    workers = std::make_unique<Workers>(threads);
  }
  return *workers;
}

bool Find(std::string_view name, Algorithm* algorithm) {
  constexpr std::pair<std::string_view, Algorithm> kAll[] = {
      {"adamw", Algorithm::kAdamW}, {"adam", Algorithm::kAdam},
      {"sgd", Algorithm::kSgd},     {"adagrad", Algorithm::kAdagrad},
      {"lion", Algorithm::kLion},
  };
  for (const auto& [known, its] : kAll) {
    if (name == known) *algorithm = its;
    if (name == known) return true;
  }
  return false;
}

}  // namespace
}  // namespace tessera

extern "C" {

// Arrays are [numel] each; `states` has as many as the formula, in its order.
// Returns 1 for an unknown name.
int tessera_step(const char* name, float* master, float* const* states,
                 const float* gradient, int64_t numel, double lr, double beta1,
                 double beta2, double momentum, double eps, double weight_decay,
                 int64_t step, int threads) {
  tessera::OptimizerOptions options = {lr, beta1, beta2, eps, weight_decay};
  if (!tessera::Find(name, &options.algorithm)) return 1;
  options.momentum = momentum;
  const tessera::Formula formula = tessera::FormulaOf(options);
  tessera::StepRange range;
  range.master = master;
  for (int s = 0; s < tessera::StatesOf(formula).count; ++s) {
    range.states[s] = states[s];
  }
  range.gradient = gradient;
  range.numel = numel;
  const auto coefficients = tessera::CoefficientsOf(options, step);
  tessera::WorkersOf(threads).Run(numel, [&](int64_t begin, int64_t end) {
    tessera::StepElements(formula, tessera::Part(range, begin, end),
                          coefficients);
  });
  return 0;
}

void tessera_triad(float* a, const float* b, const float* c, float s,
                   int64_t numel, int threads) {
  tessera::WorkersOf(threads).Run(numel, [&](int64_t begin, int64_t end) {
    tessera::Triad(a + begin, b + begin, c + begin, s, end - begin);
  });
}

const char* tessera_isa() { return tessera::IsaName(tessera::BestIsa()); }

}  // extern "C"
