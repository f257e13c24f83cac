// Vectors of floats of one instruction set, and what they are in memory. For
// step_loops.cc alone, which is compiled once for each: all of it has internal
// linkage, since the linker could take the AVX-512 copy of an inline function
// for all.
#ifndef OPTIM_KERNELS_VECTORS_H_
#define OPTIM_KERNELS_VECTORS_H_

#include <immintrin.h>

#include <cstdint>

#include "optim/kernels/block8.h"

namespace tessera::TESSERA_STEP_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
using Floats = float __attribute__((vector_size(kLanes * 4)));
using Words = uint32_t __attribute__((vector_size(kLanes * 4)));
using Ints = int32_t __attribute__((vector_size(kLanes * 4)));
using Halves = uint16_t __attribute__((vector_size(kLanes * 2)));
using Bytes = uint8_t __attribute__((vector_size(kLanes)));

struct Vector {
  static Vector Of(float all) { return {all - Floats{}}; }  // -0 stays
  Floats x;
};
inline Vector operator+(Vector a, Vector b) { return {a.x + b.x}; }
inline Vector operator-(Vector a, Vector b) { return {a.x - b.x}; }
inline Vector operator*(Vector a, Vector b) { return {a.x * b.x}; }
inline Vector operator/(Vector a, Vector b) { return {a.x / b.x}; }

#if defined(__AVX512F__)
inline Vector SquareRoot(Vector a) { return {_mm512_sqrt_ps(a.x)}; }
inline Vector MultiplyAdd(Vector a, Vector b, Vector c) {
  return {_mm512_fmadd_ps(a.x, b.x, c.x)};
}
inline Halves ToFloat16(Floats x) {
  return reinterpret_cast<Halves>(
      _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline Floats FromFloat16(Halves x) {
  return _mm512_cvtph_ps(reinterpret_cast<__m256i>(x));
}
#elif defined(__AVX2__)
inline Vector SquareRoot(Vector a) { return {_mm256_sqrt_ps(a.x)}; }
inline Vector MultiplyAdd(Vector a, Vector b, Vector c) {
  return {_mm256_fmadd_ps(a.x, b.x, c.x)};
}
inline Halves ToFloat16(Floats x) {
  return reinterpret_cast<Halves>(
      _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline Floats FromFloat16(Halves x) {
  return _mm256_cvtph_ps(reinterpret_cast<__m128i>(x));
}
#else
inline Vector SquareRoot(Vector a) { return {_mm_sqrt_ps(a.x)}; }

using Doubles = double __attribute__((vector_size(kLanes * 8)));
using Longs = int64_t __attribute__((vector_size(kLanes * 8)));

// The product is exact in float64; the sum is rounded to odd there (an inexact
// one gets a last bit of 1), from which rounding to float32 is as if it came
// from the exact sum: 53 bits are two more than 24.
//
// Source: Boldo & Melquiond, "Emulation of a FMA and correctly rounded sums:
// proved algorithms using rounding to odd", 2008.
inline Vector MultiplyAdd(Vector a, Vector b, Vector c) {
  const Doubles x = __builtin_convertvector(a.x, Doubles) *
                    __builtin_convertvector(b.x, Doubles);
  const Doubles y = __builtin_convertvector(c.x, Doubles);
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
  return {__builtin_convertvector(reinterpret_cast<Doubles>(rounded), Floats)};
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

// Subnormal: its integer, which is exact, over 2^24.
inline Floats FromFloat16(Halves x) {
  const Words bits = __builtin_convertvector(x, Words);
  const Words rest = bits & 0x7fff;
  const Words normal = (rest << 13) + 0x38000000;
  const Words small = reinterpret_cast<Words>(
      __builtin_convertvector(reinterpret_cast<Ints>(rest), Floats) * 0x1p-24f);
  Words all = rest < 0x400 ? small : normal;
  all = rest >= 0x7c00 ? (rest << 13) + 0x70000000 : all;
  return reinterpret_cast<Floats>(all | (bits & 0x8000) << 16);
}
#endif

inline Vector OneNan(Vector a) {
  return {a.x == a.x ? a.x : reinterpret_cast<Floats>(Words{} + 0x7fc00000)};
}
// NaN if either is.
inline Vector Max(Vector a, Vector b) {
  const Floats larger = a.x > b.x ? a.x : b.x;
  return OneNan({a.x == a.x ? larger : a.x});
}
// -1, 0, 1 or NaN.
inline Vector Sign(Vector a) {
  const Words one = reinterpret_cast<Words>(Vector::Of(1).x);
  const Words sign = reinterpret_cast<Words>(a.x) & 0x80000000;
  const Floats signed_one = reinterpret_cast<Floats>(sign | one);
  const Floats finite = a.x == 0 ? Floats{} : signed_one;
  return OneNan({a.x == a.x ? finite : a.x});
}

inline Halves ToBFloat16(Floats x) {
  const Words bits = reinterpret_cast<Words>(x);
  const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return __builtin_convertvector(x == x ? rounded : Words{} + 0xffff, Halves);
}
inline Floats FromBFloat16(Halves x) {
  return reinterpret_cast<Floats>(__builtin_convertvector(x, Words) << 16);
}

template <typename T>
inline T LoadAs(const void* from) {
  T x;
  __builtin_memcpy(&x, from, sizeof(x));
  return x;
}
template <typename T>
inline void Store(T x, void* to) {
  __builtin_memcpy(to, &x, sizeof(x));
}

// ---- Note [Stochastic rounding], in element_step.h

// 32 bits for each number; `seed` in two halves.
inline Words RandomBits(Words number, uint32_t seed_low, uint32_t seed_high) {
  Words x = number * 0x9e3779b9u + seed_low;
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15 ^ seed_high) * 0x846ca68bu;
  return x ^ x >> 16;
}

// `random`: 16 bits each.
inline Halves ToBFloat16Randomly(Floats x, Words random) {
  const Words bits = reinterpret_cast<Words>(x) + random;
  return __builtin_convertvector(x == x ? bits >> 16 : Words{} + 0x7fc0,
                                 Halves);
}

// ---- codes of 8 bits (block8.h)

// The code of 1, and what its bits as a float are more than it.
template <bool kNonNegative>
constexpr int32_t kCodeOfOne = kNonNegative ? 31 << 3 : 15 << 3;
template <bool kNonNegative>
constexpr int32_t kCodeBias = (127 << 3) - kCodeOfOne<kNonNegative>;

template <bool kNonNegative>
inline Bytes ToCodes(Floats x) {
  const Words bits = reinterpret_cast<Words>(x);
  const Words rest = bits & 0x7fffffff;
  const Words rounded = (rest + 0x7ffff + (rest >> 20 & 1)) >> 20;
  const Ints code = reinterpret_cast<Ints>(rounded) - kCodeBias<kNonNegative>;
  if constexpr (kNonNegative) {  // what is not 0 is 1 at least
    const Words least = __builtin_elementwise_min(rest, Words{} + 1);
    return __builtin_convertvector(
        __builtin_elementwise_max(code, reinterpret_cast<Ints>(least)), Bytes);
  }
  const Ints positive = __builtin_elementwise_max(code, Ints{});
  const Words sign = bits >> 24 & 0x80;
  return __builtin_convertvector(reinterpret_cast<Words>(positive) | sign,
                                 Bytes);
}

template <bool kNonNegative>
inline Floats FromCodes(Bytes codes) {
  const Words code = __builtin_convertvector(codes, Words);
  const Words rest = kNonNegative ? code : code & 0x7f;
  const Words bits = (rest + kCodeBias<kNonNegative>) << 20;
  const Words sign = kNonNegative ? Words{} : (code & 0x80) << 24;
  return reinterpret_cast<Floats>((rest == 0 ? Words{} : bits) | sign);
}

}  // namespace
}  // namespace tessera::TESSERA_STEP_ISA
#endif  // OPTIM_KERNELS_VECTORS_H_
