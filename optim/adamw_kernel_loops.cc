// The loop of AdamWUpdate. Compiled once for each instruction set, with its
// flags and TESSERA_ADAMW_ISA, a name of its own (BUILD). Nothing here may come
// from a shared template or inline function: the linker could take its AVX-512
// copy for all.
#include <immintrin.h>

#include <cstdint>

#include "optim/adamw_kernel.h"

namespace tessera::TESSERA_ADAMW_ISA {
namespace {

// ---- a vector of floats, and what differs between the instruction sets

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
using Floats = float __attribute__((vector_size(kLanes * 4)));
using Words = uint32_t __attribute__((vector_size(kLanes * 4)));
using Halves = uint16_t __attribute__((vector_size(kLanes * 2)));

#if defined(__AVX512F__)
inline Floats Sqrt(Floats x) { return _mm512_sqrt_ps(x); }
inline Floats MultiplyAdd(Floats a, Floats b, Floats c) {
  return _mm512_fmadd_ps(a, b, c);
}
inline Halves ToFloat16(Floats x) {
  return reinterpret_cast<Halves>(
      _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__AVX2__)
inline Floats Sqrt(Floats x) { return _mm256_sqrt_ps(x); }
inline Floats MultiplyAdd(Floats a, Floats b, Floats c) {
  return _mm256_fmadd_ps(a, b, c);
}
inline Halves ToFloat16(Floats x) {
  return reinterpret_cast<Halves>(
      _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
#else
inline Floats Sqrt(Floats x) { return _mm_sqrt_ps(x); }

using Doubles = double __attribute__((vector_size(kLanes * 8)));
using Longs = int64_t __attribute__((vector_size(kLanes * 8)));

// The product is exact in float64; the sum is rounded to odd there (an inexact
// one gets a last bit of 1), from which rounding to float32 is as if it came
// from the exact sum: 53 bits are two more than 24.
//
// Source: Boldo & Melquiond, "Emulation of a FMA and correctly rounded sums:
// proved algorithms using rounding to odd", 2008.
inline Floats MultiplyAdd(Floats a, Floats b, Floats c) {
  const Doubles x =
      __builtin_convertvector(a, Doubles) * __builtin_convertvector(b, Doubles);
  const Doubles y = __builtin_convertvector(c, Doubles);
  const Doubles sum = x + y;
  // sum + error is exact: Knuth's two-sum. NaN where the sum is not finite.
  const Doubles y_part = sum - x;
  const Doubles error = (x - (sum - y_part)) + (y - y_part);
  const Longs bits = reinterpret_cast<Longs>(sum);
  const Longs inexact = (error < 0) | (error > 0);
  // Away from zero if the error has the sum's sign, else toward it.
  const Longs grows = ~((reinterpret_cast<Longs>(error) ^ bits) >> 63);
  const Longs odd = bits + ((grows & 2) - 1);
  const Longs change = inexact & ((bits & 1) - 1);  // only even ones
  const Longs rounded = (change & odd) | (~change & bits);
  return __builtin_convertvector(reinterpret_cast<Doubles>(rounded), Floats);
}

inline Halves ToFloat16(Floats x) {
  const Words bits = reinterpret_cast<Words>(x);
  const Words rest = bits & 0x7fffffff;
  // Subnormal: adding 0.5 makes the sum's last bit that of the smallest one.
  const Words small =
      reinterpret_cast<Words>(reinterpret_cast<Floats>(rest) + 0.5f) -
      0x3f000000;
  const Words normal = (rest + 0xfff + (rest >> 13 & 1) - 0x38000000) >> 13;
  Words half = rest < 0x38800000 ? small : normal;
  half = rest >= 0x477ff000 ? Words{} + 0x7c00 : half;
  half = rest > 0x7f800000 ? Words{} + 0x7e00 : half;
  half |= bits >> 16 & 0x8000;
  return __builtin_convertvector(half, Halves);
}
#endif

inline Floats All(float x) { return x - Floats{}; }  // -0 stays

inline Floats OneNan(Floats x) {
  return x == x ? x : reinterpret_cast<Floats>(Words{} + 0x7fc00000);
}

inline Halves ToBFloat16(Floats x) {
  const Words bits = reinterpret_cast<Words>(x);
  const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return __builtin_convertvector(x == x ? rounded : Words{} + 0xffff, Halves);
}

inline Floats Load(const float* from) {
  Floats x;
  __builtin_memcpy(&x, from, sizeof(x));
  return x;
}
template <typename T>
inline void Store(T x, void* to) {
  __builtin_memcpy(to, &x, sizeof(x));
}

// ---- the step

// Elements of one turn of the loop: a cache line of floats.
constexpr int kTurn = 16;
// What is fetched ahead, in elements; the processor's own prefetchers stop at
// the end of a page.
constexpr int64_t kAhead = 512;

struct Coefficients {
  explicit Coefficients(const AdamWCoefficients& c)
      : decay(All(c.decay)),
        weight(All(c.exp_avg_weight)),
        beta2(All(c.beta2)),
        square_weight(All(c.exp_avg_sq_weight)),
        correction(All(c.bias_correction2_sqrt)),
        eps(All(c.eps)),
        minus_step_size(All(c.minus_step_size)),
        factor(All(c.gradient_factor)) {
    // As a lerp does it: from the nearer end.
    from_gradient = !(c.exp_avg_weight < 0.5f);
    if (from_gradient) weight = All(c.exp_avg_weight - 1);
  }
  Floats decay, weight, beta2, square_weight, correction, eps, minus_step_size,
      factor;
  bool from_gradient;
};

template <WorkingType kWorking>
inline void StoreWorking(Floats x, void* working, int64_t i) {
  if constexpr (kWorking == WorkingType::kFloat32) {
    Store(x, static_cast<float*>(working) + i);
  } else if constexpr (kWorking == WorkingType::kBFloat16) {
    Store(ToBFloat16(x), static_cast<uint16_t*>(working) + i);
  } else if constexpr (kWorking == WorkingType::kFloat16) {
    Store(ToFloat16(x), static_cast<uint16_t*>(working) + i);
  }
}

// Elements i .. i + kLanes.
template <WorkingType kWorking, bool kFromGradient>
inline void Step(const AdamWRange& r, const Coefficients& c, int64_t i) {
  const Floats gradient = Load(r.gradient + i) * c.factor;
  Floats exp_avg = Load(r.exp_avg + i);
  exp_avg = OneNan(MultiplyAdd(c.weight, gradient - exp_avg,
                               kFromGradient ? gradient : exp_avg));
  Store(exp_avg, r.exp_avg + i);
  const Floats exp_avg_sq = OneNan(MultiplyAdd(
      gradient, gradient * c.square_weight, Load(r.exp_avg_sq + i) * c.beta2));
  Store(exp_avg_sq, r.exp_avg_sq + i);
  const Floats denominator = Sqrt(exp_avg_sq) / c.correction + c.eps;
  const Floats master = OneNan(Load(r.master + i) * c.decay +
                               c.minus_step_size * exp_avg / denominator);
  Store(master, r.new_master + i);
  StoreWorking<kWorking>(master, r.working, i);
}

template <WorkingType kWorking, bool kFromGradient>
inline void Turn(const AdamWRange& r, const Coefficients& c, int64_t i) {
  for (int lane = 0; lane < kTurn; lane += kLanes) {
    Step<kWorking, kFromGradient>(r, c, i + lane);
  }
}

// The last elements, in a copy that is as long as a turn.
template <WorkingType kWorking, bool kFromGradient>
inline void Tail(const AdamWRange& r, const Coefficients& c, int64_t begin) {
  constexpr int64_t item = kWorking == WorkingType::kFloat32 ? 4 : 2;
  float master[kTurn] = {}, exp_avg[kTurn] = {}, exp_avg_sq[kTurn] = {},
        gradient[kTurn] = {}, working[kTurn];
  const auto bytes = static_cast<size_t>(r.numel - begin) * sizeof(float);
  __builtin_memcpy(master, r.master + begin, bytes);
  __builtin_memcpy(exp_avg, r.exp_avg + begin, bytes);
  __builtin_memcpy(exp_avg_sq, r.exp_avg_sq + begin, bytes);
  __builtin_memcpy(gradient, r.gradient + begin, bytes);
  AdamWRange tail;
  tail.master = tail.new_master = master;
  tail.exp_avg = exp_avg;
  tail.exp_avg_sq = exp_avg_sq;
  tail.gradient = gradient;
  tail.working = working;
  Turn<kWorking, kFromGradient>(tail, c, 0);
  __builtin_memcpy(r.new_master + begin, master, bytes);
  __builtin_memcpy(r.exp_avg + begin, exp_avg, bytes);
  __builtin_memcpy(r.exp_avg_sq + begin, exp_avg_sq, bytes);
  if (kWorking != WorkingType::kNone) {
    __builtin_memcpy(static_cast<char*>(r.working) + begin * item, working,
                     bytes / sizeof(float) * item);
  }
}

template <WorkingType kWorking, bool kFromGradient>
void Loop(const AdamWRange& range, const Coefficients& coefficients) {
  AdamWRange r = range;
  if (r.new_master == nullptr) r.new_master = r.master;
  const Coefficients c = coefficients;
  int64_t i = 0;
  for (; i + kTurn <= r.numel; i += kTurn) {
    // May lie beyond the end: that is no access.
    __builtin_prefetch(r.gradient + i + kAhead);
    __builtin_prefetch(r.master + i + kAhead, 1);
    __builtin_prefetch(r.exp_avg + i + kAhead, 1);
    __builtin_prefetch(r.exp_avg_sq + i + kAhead, 1);
    Turn<kWorking, kFromGradient>(r, c, i);
  }
  if (i < r.numel) Tail<kWorking, kFromGradient>(r, c, i);
}

template <WorkingType kWorking>
void LoopOf(const AdamWRange& range, const Coefficients& c) {
  c.from_gradient ? Loop<kWorking, true>(range, c)
                  : Loop<kWorking, false>(range, c);
}

}  // namespace

void Update(const AdamWRange& range, const AdamWCoefficients& coefficients) {
  const Coefficients c(coefficients);
  switch (range.working_type) {
    case WorkingType::kNone:
      return LoopOf<WorkingType::kNone>(range, c);
    case WorkingType::kFloat32:
      return LoopOf<WorkingType::kFloat32>(range, c);
    case WorkingType::kBFloat16:
      return LoopOf<WorkingType::kBFloat16>(range, c);
    case WorkingType::kFloat16:
      return LoopOf<WorkingType::kFloat16>(range, c);
  }
}

}  // namespace tessera::TESSERA_ADAMW_ISA
