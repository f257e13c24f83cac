#include "optim/kernels/element_step.h"

#include <cmath>

#include "optim/formulas/formulas.h"
#include "optim/kernels/block8.h"

namespace tessera {

#define TESSERA_STEP_DECLARE(isa)                                  \
  namespace step_##isa {                                           \
    void Step(Formula, const StepRange&, const StepCoefficients&); \
  }
TESSERA_STEP_DECLARE(portable)
TESSERA_STEP_DECLARE(avx2)
TESSERA_STEP_DECLARE(avx512)
#undef TESSERA_STEP_DECLARE

namespace {

// One of float64, for formulas.
struct Number {
  static Number Of(double x) { return {x}; }
  double x;
};
Number operator+(Number a, Number b) { return {a.x + b.x}; }
Number operator-(Number a, Number b) { return {a.x - b.x}; }
Number operator*(Number a, Number b) { return {a.x * b.x}; }
Number operator/(Number a, Number b) { return {a.x / b.x}; }
Number SquareRoot(Number a) { return {std::sqrt(a.x)}; }
Number MultiplyAdd(Number a, Number b, Number c) {
  return {std::fma(a.x, b.x, c.x)};
}
Number OneNan(Number a) { return {std::isnan(a.x) ? std::nan("") : a.x}; }
Number Max(Number a, Number b) {
  return {a.x > b.x || std::isnan(a.x) ? a.x : b.x};
}
Number Sign(Number a) {
  return {a.x > 0 ? 1 : a.x < 0 ? -1 : a.x == 0 ? 0 : a.x};
}

template <typename F>
void StepDoubles(const StepRange& r, const StepCoefficients& k) {
  Number c[kMaxCoefficients];
  for (int i = 0; i < kMaxCoefficients; ++i) c[i] = {k.values[i]};
  auto* const masters = static_cast<double*>(r.master);
  auto* const new_masters =
      r.new_master == nullptr ? masters : static_cast<double*>(r.new_master);
  const auto* const gradients = static_cast<const double*>(r.gradient);
  for (int64_t i = 0; i < r.numel; ++i) {
    Number master = {masters[i]}, states[F::kStates + 1];
    for (int s = 0; s < F::kStates; ++s) {
      states[s] = {static_cast<double*>(r.states[s])[i]};
    }
    F::Step(c, k.variant,
            Number{gradients[i]} * Number{k.gradient_factor * k.sign}, &master,
            states);
    new_masters[i] = OneNan(master).x;
    if (r.average != nullptr) {
      double& average = static_cast<double*>(r.average)[i];
      average = OneNan(MultiplyAdd(Number{k.average_weight},
                                   master - Number{average}, Number{average}))
                    .x;
    }
    for (int s = 0; s < F::kStates; ++s) {
      void* const to =
          r.new_states[s] == nullptr ? r.states[s] : r.new_states[s];
      static_cast<double*>(to)[i] = OneNan(states[s]).x;
    }
  }
}

void* At(void* begin, NumberType type, int64_t i) {
  return begin == nullptr ? nullptr
                          : static_cast<char*>(begin) + BytesOf(type, i);
}

}  // namespace

int64_t BytesOf(NumberType type, int64_t numel) {
  switch (type) {
    case NumberType::kNone:
      return 0;
    case NumberType::kFloat32:
      return 4 * numel;
    case NumberType::kBFloat16:
    case NumberType::kFloat16:
    case NumberType::kRemainder:
      return 2 * numel;
    case NumberType::kFloat64:
      return 8 * numel;
    case NumberType::kBlock8:
      return (numel + kBlock8Elements - 1) / kBlock8Elements * kBlock8Bytes;
  }
}

NumberType AverageType(NumberType masters) {
  return masters == NumberType::kRemainder ? NumberType::kFloat32 : masters;
}

StepRange Part(const StepRange& range, int64_t begin, int64_t end) {
  StepRange part = range;
  part.master = At(range.master, range.master_type, begin);
  part.new_master = At(range.new_master, range.master_type, begin);
  for (void*& state : part.new_states) {
    state = At(state, range.state_type, begin);
  }
  part.working = At(range.working, range.working_type, begin);
  part.average = At(range.average, AverageType(range.master_type), begin);
  part.gradient = static_cast<const char*>(range.gradient) +
                  BytesOf(range.gradient_type, begin);
  part.number += begin;
  int64_t states_begin = begin;
  if (range.state_type == NumberType::kBlock8) {
    const int64_t place = range.in_block + begin;
    part.in_block = static_cast<int>(place % kBlock8Elements);
    states_begin = place - part.in_block;
  }
  for (void*& state : part.states) {
    state = At(state, range.state_type, states_begin);
  }
  part.numel = end - begin;
  return part;
}

void StepElements(Formula formula, const StepRange& range,
                  const StepCoefficients& coefficients, Isa isa) {
  if (range.master_type == NumberType::kFloat64) {
    return VisitFormula(formula, [&](auto f) {
      StepDoubles<decltype(f)>(range, coefficients);
    });
  }
  switch (isa) {
    case Isa::kPortable:
      return step_portable::Step(formula, range, coefficients);
    case Isa::kAvx2:
      return step_avx2::Step(formula, range, coefficients);
    case Isa::kAvx512:
      return step_avx512::Step(formula, range, coefficients);
  }
}

}  // namespace tessera
