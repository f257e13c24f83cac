// Vectors of floats of one instruction set, and their forms in memory. Only
// step_loops.cc includes it, which is compiled once for each instruction set:
// all of it has internal linkage, since the linker could take the AVX-512 copy
// of an inline function for all.
#ifndef OPTIM_KERNELS_VECTORS_H_
#define OPTIM_KERNELS_VECTORS_H_

#include <immintrin.h>

#include <cstdint>
#include <utility>

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
using Shorts = int16_t __attribute__((vector_size(kLanes * 2)));
// Elements of two, and of four, vectors.
using Halves2 = uint16_t __attribute__((vector_size(kLanes * 4)));
using Shorts2 = int16_t __attribute__((vector_size(kLanes * 4)));
using Bytes4 = uint8_t __attribute__((vector_size(kLanes * 4)));

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
  return {a.x == a.x ? larger : a.x};
}
// -1, 0, 1 or NaN.
inline Vector Sign(Vector a) {
  const Words one = reinterpret_cast<Words>(Vector::Of(1).x);
  const Words sign = reinterpret_cast<Words>(a.x) & 0x80000000;
  const Floats signed_one = reinterpret_cast<Floats>(sign | one);
  const Floats finite = a.x == 0 ? Floats{} : signed_one;
  return {a.x == a.x ? finite : a.x};
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

// The upper halves of two vectors' elements.
template <int... kPlace>
inline Halves2 UpperHalves(Words a, Words b,
                           std::integer_sequence<int, kPlace...>) {
  return __builtin_shufflevector(reinterpret_cast<Halves2>(a),
                                 reinterpret_cast<Halves2>(b),
                                 (2 * kPlace + 1)...);
}
inline Halves2 UpperHalves(Words a, Words b) {
  return UpperHalves(a, b, std::make_integer_sequence<int, 2 * kLanes>());
}

template <int... kPlace>
inline Halves2 LowerHalves(Words a, Words b,
                           std::integer_sequence<int, kPlace...>) {
  return __builtin_shufflevector(reinterpret_cast<Halves2>(a),
                                 reinterpret_cast<Halves2>(b), (2 * kPlace)...);
}
inline Halves2 LowerHalves(Words a, Words b) {
  return LowerHalves(a, b, std::make_integer_sequence<int, 2 * kLanes>());
}

// To nearest even; NaN is 0xffff.
inline Words RoundedToUpper(Floats x) {
  const Words bits = reinterpret_cast<Words>(x);
  const Words rounded = bits + 0x7fff + (bits >> 16 & 1);
  return rounded | reinterpret_cast<Words>(x != x);
}
inline Halves2 ToBFloat16(Floats a, Floats b) {
  return UpperHalves(RoundedToUpper(a), RoundedToUpper(b));
}

// ---- Note [Stochastic rounding], in element_step.h

// 32 bits for each element of consecutive vectors; `number`: of the first one.
class RandomBits {
 public:
  RandomBits(uint64_t number, uint64_t seed)
      : left_(~static_cast<uint32_t>(number)),
        upper_(static_cast<uint32_t>(number >> 32)),
        high_(static_cast<uint32_t>(seed >> 32)) {
    for (int j = 0; j < kLanes; ++j) lane_[j] = static_cast<uint32_t>(j);
    x_ = lane_ * kStep +
         (static_cast<uint32_t>(number) * kStep + static_cast<uint32_t>(seed));
    other_ = Words{} + (high_ ^ upper_ * kUpper);
  }
  Words Next() {
    Words x = x_, other = other_;
    if (__builtin_expect(left_ < kBlock8Elements, false)) other = PastUpper();
    x_ += kLanes * kStep;
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15 ^ other) * 0x846ca68bu;
    return x ^ x >> 16;
  }

 private:
  static constexpr uint32_t kStep = 0x9e3779b9u, kUpper = 0x85ebca6bu;

  // With the next upper half from where the lower one is 0 again.
  Words PastUpper() {
    const Words next = Words{} + (high_ ^ (upper_ + 1) * kUpper);
    const Words other = lane_ > left_ ? next : other_;
    lane_ += kLanes;
    return other;
  }

  uint32_t left_, upper_, high_;
  Words lane_, x_, other_;
};

// The lower, the upper and the middle bits belong to one of three states each.
template <int kState, int kBits>
inline Words BitsOfState(Words random) {
  static_assert(kState < 3, "bits for three states");
  constexpr uint32_t kMask = (1u << kBits) - 1;
  return kState == 0   ? random & kMask
         : kState == 1 ? random >> (32 - kBits)
                       : random >> (32 - kBits) / 2 & kMask;
}

// Returns words that are cut to 16 bits afterwards. A NaN is 0x7fc00000, and
// stays one.
template <int kState>
inline Words RandomlyUp(Vector x, Words random) {
  return reinterpret_cast<Words>(x.x) + BitsOfState<kState, 16>(random);
}

// A number of 2^-24 and less of those below 2^-14, in integers: the exponent
// says how many bits of the mantissa go.
inline Halves RandomlyToFloat16(Floats x, Words random) {
  const Words bits = reinterpret_cast<Words>(x);
  const Words rest = bits & 0x7fffffff;
  const Words exponent = rest >> 23;
  const Words lost = Words{} + 126 - exponent;
  const Words shift = lost < 32 ? lost : Words{};
  const Words mantissa =
      (rest & 0x7fffff) | (exponent > 0 ? Words{} + 0x800000 : Words{});
  const Words tiny =
      (mantissa + (random & ((Words{} + 1) << shift) - 1)) >> shift;
  const Words small = lost < 32 ? tiny : Words{};
  const Words normal = (rest + (random & 0x1fff) - 0x38000000) >> 13;
  Words half = rest < 0x38800000 ? small : normal;
  half = rest >= 0x47800000 ? Words{} + 0x7c00 : half;
  half = rest > 0x7f800000 ? Words{} + 0x7e00 : half;
  half |= bits >> 16 & 0x8000;
  return __builtin_convertvector(half, Halves);
}

// Returns words that are cut to codes of 8 bits afterwards: 20 bits are lost.
// The tiniest numbers are unchanged, and differ from zero in the upper half.
template <int kState>
inline Words RandomlyUpToCode(Vector x, Words random) {
  const Words bits = BitsOfState<kState, 20>(random);
  const Words word = reinterpret_cast<Words>(OneNan(x).x);
  return (word & 0x7fffffff) < 0x10000 ? word : word + bits;
}

// ---- codes of 8 bits (block8.h), of four vectors at once

// A code is bits 20 to 30 of a float, less those of the scale, and this more.
template <bool kNonNegative>
constexpr uint16_t kCodeOfOne = (kNonNegative ? 31 : 15) << 3;

// Packing and unpacking work on each 16 bytes alone: from four vectors a to d
// they make a0-3 b0-3 c0-3 d0-3 a4-7 ...
constexpr int PackedPlace(int element) {
  const int vector = element / kLanes, in_vector = element % kLanes;
  return in_vector / 4 * 16 + vector * 4 + in_vector % 4;
}
constexpr int PackedElement(int place) {
  return place % 16 / 4 * kLanes + place / 16 * 4 + place % 4;
}
template <int... kPlace>
inline Bytes4 ToPackedOrder(Bytes4 x, std::integer_sequence<int, kPlace...>) {
  return __builtin_shufflevector(x, x, PackedElement(kPlace)...);
}
template <int... kPlace>
inline Bytes4 FromPackedOrder(Bytes4 x, std::integer_sequence<int, kPlace...>) {
  return __builtin_shufflevector(x, x, PackedPlace(kPlace)...);
}

// The upper halves of a and b; numbers below 256 as bytes.
template <int... kPlace>
inline Halves2 PackUpper(Words a, Words b,
                         std::integer_sequence<int, kPlace...>) {
  return __builtin_shufflevector(
      reinterpret_cast<Halves2>(a), reinterpret_cast<Halves2>(b),
      (kPlace / 8 * 8 + kPlace % 4 * 2 + kPlace % 8 / 4 * 2 * kLanes + 1)...);
}
inline Bytes4 PackBytes(Halves2 a, Halves2 b) {
#if defined(__AVX512F__)
  return reinterpret_cast<Bytes4>(_mm512_packus_epi16(
      reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<Bytes4>(_mm256_packus_epi16(
      reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
  return reinterpret_cast<Bytes4>(_mm_packus_epi16(
      reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#endif
}

// The first or second half of each 16 bytes, as upper halves of what is twice
// as wide.
constexpr int UnpackedFrom(int place, int lane, bool second) {
  return place / lane * lane + (second ? lane / 2 : 0) + place % lane / 2;
}
template <bool kSecond, int... kPlace>
inline Halves2 UnpackBytes(Bytes4 x, std::integer_sequence<int, kPlace...>) {
  return reinterpret_cast<Halves2>(__builtin_shufflevector(
      Bytes4{}, x,
      (kPlace % 2 == 0 ? kPlace
                       : 4 * kLanes + UnpackedFrom(kPlace, 16, kSecond))...));
}
template <bool kSecond, int... kPlace>
inline Vector UnpackHalves(Halves2 x, std::integer_sequence<int, kPlace...>) {
  return {reinterpret_cast<Floats>(__builtin_shufflevector(
      Halves2{}, x,
      (kPlace % 2 == 0 ? kPlace
                       : 2 * kLanes + UnpackedFrom(kPlace, 8, kSecond))...))};
}

// Cuts words to codes; `scale`: the upper half of its bits.
template <bool kNonNegative>
inline Bytes4 ToCodes(const Vector x[4], uint16_t scale) {
  constexpr std::make_integer_sequence<int, 2 * kLanes> kHalves;
  const Halves2 none = Halves2{} + static_cast<uint16_t>(
                                       (scale >> 4) - kCodeOfOne<kNonNegative>);
  Halves2 codes[2];
  for (int i = 0; i < 2; ++i) {
    const Halves2 half =
        PackUpper(reinterpret_cast<Words>(x[2 * i].x),
                  reinterpret_cast<Words>(x[2 * i + 1].x), kHalves);
    const Halves2 rest = kNonNegative ? half >> 4 : half >> 4 & 0x7ff;
    codes[i] = __builtin_elementwise_max(rest, none) - none;
    if constexpr (kNonNegative) {  // 2^-133 and more are 1 at least
      codes[i] = __builtin_elementwise_max(
          codes[i], half > 0 ? Halves2{} + 1 : Halves2{});
    } else {
      codes[i] |= half >> 8 & 0x80;
    }
  }
  return FromPackedOrder(PackBytes(codes[0], codes[1]),
                         std::make_integer_sequence<int, 4 * kLanes>());
}

template <bool kNonNegative>
inline void FromCodes(Bytes4 codes, uint16_t scale, Vector to[4]) {
  constexpr std::make_integer_sequence<int, 4 * kLanes> kBytes;
  constexpr std::make_integer_sequence<int, 2 * kLanes> kHalves;
  const Halves2 none = Halves2{} + static_cast<uint16_t>(
                                       scale - (kCodeOfOne<kNonNegative> << 4));
  const Bytes4 packed = ToPackedOrder(codes, kBytes);
  const Halves2 wide[2] = {UnpackBytes<false>(packed, kBytes),
                           UnpackBytes<true>(packed, kBytes)};
  for (int i = 0; i < 2; ++i) {
    Halves2 x = wide[i] >> 4;
    if constexpr (!kNonNegative) {
      x = reinterpret_cast<Halves2>(reinterpret_cast<Shorts2>(wide[i]) >> 4) &
          0x87f0;
    }
    const Halves2 more = x + x == 0 ? Halves2{} : none;  // 0 stays
    to[2 * i] = UnpackHalves<false>(x + more, kHalves);
    to[2 * i + 1] = UnpackHalves<true>(x + more, kHalves);
  }
}

}  // namespace
}  // namespace tessera::TESSERA_STEP_ISA
#endif  // OPTIM_KERNELS_VECTORS_H_
