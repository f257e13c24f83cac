// StepElements (optim/kernels/element_step.h) of single elements, with its
// bits, as functions that CPU and GPU share.
#ifndef OPTIM_CUDA_STEP_ELEMENT_H_
#define OPTIM_CUDA_STEP_ELEMENT_H_

#include <cstdint>

#include "optim/cuda/arithmetic.h"
#include "optim/formulas/formulas.h"
#include "optim/kernels/block8.h"
#include "optim/kernels/element_step.h"

namespace tessera {

// One number, for formulas.
template <typename T>
struct Scalar {
  TESSERA_HOST_DEVICE static Scalar Of(T x) { return {x}; }
  T x;
};
template <typename T>
TESSERA_HOST_DEVICE inline Scalar<T> operator+(Scalar<T> a, Scalar<T> b) {
  return {Plus(a.x, b.x)};
}
template <typename T>
TESSERA_HOST_DEVICE inline Scalar<T> operator-(Scalar<T> a, Scalar<T> b) {
  return {Minus(a.x, b.x)};
}
template <typename T>
TESSERA_HOST_DEVICE inline Scalar<T> operator*(Scalar<T> a, Scalar<T> b) {
  return {Times(a.x, b.x)};
}
template <typename T>
TESSERA_HOST_DEVICE inline Scalar<T> operator/(Scalar<T> a, Scalar<T> b) {
  return {Over(a.x, b.x)};
}
template <typename T>
TESSERA_HOST_DEVICE inline Scalar<T> SquareRoot(Scalar<T> a) {
  return {SquareRoot(a.x)};
}
template <typename T>
TESSERA_HOST_DEVICE inline Scalar<T> MultiplyAdd(Scalar<T> a, Scalar<T> b,
                                                 Scalar<T> c) {
  return {MultiplyAdd(a.x, b.x, c.x)};
}
template <typename T>
TESSERA_HOST_DEVICE inline Scalar<T> OneNan(Scalar<T> a) {
  return {OneNan(a.x)};
}
template <typename T>
TESSERA_HOST_DEVICE inline Scalar<T> Max(Scalar<T> a, Scalar<T> b) {
  return {a.x > b.x || a.x != a.x ? a.x : b.x};
}
template <typename T>
TESSERA_HOST_DEVICE inline Scalar<T> Sign(Scalar<T> a) {
  const T one = a.x > 0 ? T(1) : T(-1);
  return {a.x == 0 ? T(0) : a.x == a.x ? one : a.x};
}

// ---- 16 and 8 bits

// To nearest even, as bits.
TESSERA_HOST_DEVICE inline uint16_t BFloat16BitsOf(float x) {
  const uint32_t bits = BitCast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return static_cast<uint16_t>(x == x ? rounded : 0xffff);
}

TESSERA_HOST_DEVICE inline uint16_t Float16BitsOf(float x) {
  const uint32_t bits = BitCast<uint32_t>(x);
  const uint32_t rest = bits & 0x7fffffff;
  const uint32_t sign = bits >> 16 & 0x8000;
  uint32_t half = (rest + 0xfff + (rest >> 13 & 1) - 0x38000000) >> 13;
  // Subnormal: adding 0.5 makes the sum's last bit that of the smallest one.
  if (rest < 0x38800000) {
    half = BitCast<uint32_t>(Plus(BitCast<float>(rest), 0.5f)) - 0x3f000000;
  }
  if (rest >= 0x477ff000) half = 0x7c00;
  if (rest > 0x7f800000) half = 0x7e00;
  return static_cast<uint16_t>(half | sign);
}

TESSERA_HOST_DEVICE inline float FloatOfBFloat16(uint16_t bits) {
  return BitCast<float>(static_cast<uint32_t>(bits) << 16);
}

TESSERA_HOST_DEVICE inline float FloatOfFloat16(uint16_t half) {
  const uint32_t rest = half & 0x7fffu;
  const uint32_t sign = (half & 0x8000u) << 16;
  if (rest < 0x400) {  // subnormal: its integer, which is exact, over 2^24
    const float small = Times(static_cast<float>(rest), 0x1p-24f);
    return BitCast<float>(BitCast<uint32_t>(small) | sign);
  }
  const uint32_t more = rest >= 0x7c00 ? 0x70000000u : 0x38000000u;
  return BitCast<float>(((rest << 13) + more) | sign);
}

// Masters in two halves, as offload/remainders.h has them.
TESSERA_HOST_DEVICE inline float JoinedMasterOf(uint16_t working,
                                                uint16_t remainder) {
  const uint32_t borrow = remainder >> 15;  // it is negative
  return BitCast<float>(((working - borrow) << 16) + remainder);
}
TESSERA_HOST_DEVICE inline uint16_t UpperBitsOf(float master) {
  return static_cast<uint16_t>((BitCast<uint32_t>(master) + 0x8000) >> 16);
}
TESSERA_HOST_DEVICE inline uint16_t RemainderBitsOf(float master) {
  return static_cast<uint16_t>(BitCast<uint32_t>(master));
}

// Note [Stochastic rounding], in element_step.h. `number`: in the parameter.
TESSERA_HOST_DEVICE inline uint32_t RandomBitsOf(uint64_t number,
                                                 uint64_t seed) {
  const uint32_t other = static_cast<uint32_t>(seed >> 32) ^
                         static_cast<uint32_t>(number >> 32) * 0x85ebca6bu;
  uint32_t x =
      static_cast<uint32_t>(number) * 0x9e3779b9u + static_cast<uint32_t>(seed);
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15 ^ other) * 0x846ca68bu;
  return x ^ x >> 16;
}
// The lower, the upper and the middle bits are one of three states' each.
template <int kBits>
TESSERA_HOST_DEVICE inline uint32_t BitsOfState(int state, uint32_t random) {
  constexpr uint32_t kMask = (1u << kBits) - 1;
  return state == 0   ? random & kMask
         : state == 1 ? random >> (32 - kBits)
                      : random >> (32 - kBits) / 2 & kMask;
}
TESSERA_HOST_DEVICE inline uint16_t BFloat16StateBitsOf(float x, int state,
                                                        uint32_t random) {
  const uint32_t bits = BitsOfState<16>(state, random);
  const uint32_t rounded = (BitCast<uint32_t>(x) + bits) >> 16;
  return static_cast<uint16_t>(x == x ? rounded : 0x7fc0);
}

// Rounds masters. In float16 those below 2^-14 are counts of 2^-24: the
// exponent says how many bits of the mantissa go.
TESSERA_HOST_DEVICE inline uint16_t RandomFloat16BitsOf(float x,
                                                        uint32_t random) {
  const uint32_t bits = BitCast<uint32_t>(x);
  const uint32_t rest = bits & 0x7fffffff;
  uint32_t half = (rest + (random & 0x1fff) - 0x38000000) >> 13;
  if (rest < 0x38800000) {
    const uint32_t exponent = rest >> 23;
    const uint32_t mantissa = (rest & 0x7fffff) | (exponent > 0 ? 0x800000 : 0);
    const uint32_t lost = 126 - exponent;
    half = lost < 32 ? (mantissa + (random & ((1u << lost) - 1))) >> lost : 0;
  }
  if (rest >= 0x47800000) half = 0x7c00;
  if (rest > 0x7f800000) half = 0x7e00;
  return static_cast<uint16_t>(half | (bits >> 16 & 0x8000));
}
TESSERA_HOST_DEVICE inline uint16_t NarrowMasterBitsOf(float x, NumberType type,
                                                       uint64_t number,
                                                       uint64_t seed) {
  const uint32_t random = RandomBitsOf(number, seed ^ kMasterSeed);
  return type == NumberType::kBFloat16 ? BFloat16StateBitsOf(x, 0, random)
                                       : RandomFloat16BitsOf(x, random);
}

// block8.h. `scale`: its bits.
TESSERA_HOST_DEVICE inline uint32_t Block8ExponentOf(uint32_t scale,
                                                     bool non_negative) {
  return (scale >> 23) - (non_negative ? 31 : 15);  // of code 0
}
// What of an element is cut to a code.
TESSERA_HOST_DEVICE inline uint32_t Block8WordOf(float x, int state,
                                                 uint32_t random) {
  const uint32_t bits = BitsOfState<20>(state, random);
  const auto word = BitCast<uint32_t>(x);
  return (word & 0x7fffffff) < 0x10000 ? word : word + bits;
}
TESSERA_HOST_DEVICE inline uint8_t Block8CodeOf(uint32_t word, uint32_t scale,
                                                bool non_negative) {
  if (scale >= 0x7f800000) return non_negative ? 31 << 3 : 15 << 3;
  const uint32_t rest = word & 0x7fffffff;
  const auto code =
      static_cast<int32_t>(rest >> 20) -
      static_cast<int32_t>(Block8ExponentOf(scale, non_negative) << 3);
  if (non_negative) {
    return static_cast<uint8_t>(code < 1 ? (rest < 0x10000 ? 0 : 1) : code);
  }
  return static_cast<uint8_t>((code < 1 ? 0 : code) |
                              static_cast<int32_t>(word >> 24 & 0x80));
}
TESSERA_HOST_DEVICE inline float Block8ValueOf(uint8_t code, uint32_t scale,
                                               bool non_negative) {
  const uint32_t rest = non_negative ? code : code & 0x7fu;
  const uint32_t sign = non_negative ? 0 : (code & 0x80u) << 24;
  const uint32_t bits =
      rest == 0 ? 0
                : (rest << 20) + (scale - ((non_negative ? 31u : 15u) << 23));
  return BitCast<float>(bits | sign);
}
// The scale's bits, of the largest magnitude of words, kBlock8LeastScale among
// them.
TESSERA_HOST_DEVICE inline uint32_t Block8ScaleOf(uint32_t largest) {
  const uint32_t scale = largest & 0x7f800000;
  return scale < 0x7f800000 ? scale : 0x7fc00000u;
}

// ---- a step

// What one launch has in common. The factor may come later, from a device.
template <typename T>
struct StepConstants {
  TESSERA_HOST_DEVICE explicit StepConstants(const StepCoefficients& k)
      : variant(k.variant),
        sign(k.sign),
        seed(k.seed),
        average_weight{static_cast<T>(k.average_weight)} {
    for (int i = 0; i < kMaxCoefficients; ++i) {
      c[i] = {static_cast<T>(k.values[i])};
    }
    SetFactor(k.gradient_factor);
  }
  TESSERA_HOST_DEVICE void SetFactor(double value) {
    factor = {static_cast<T>(Times(value, sign))};
  }
  Scalar<T> c[kMaxCoefficients];
  Scalar<T> factor;
  bool variant;
  double sign;
  uint64_t seed;
  Scalar<T> average_weight;
};

template <typename T>
TESSERA_HOST_DEVICE inline T AverageOf(const StepConstants<T>& k, T average,
                                       T master) {
  return OneNan(
      MultiplyAdd(k.average_weight.x, Minus(master, average), average));
}

// Masters and states of one element, as the formula changes them.
template <typename T>
struct StepElement {
  Scalar<T> master;
  Scalar<T> states[kMaxStates];
};

template <typename F, typename T>
TESSERA_HOST_DEVICE inline void StepOneElement(const StepConstants<T>& k,
                                               T gradient,
                                               StepElement<T>* element) {
  F::Step(k.c, k.variant, Scalar<T>{gradient} * k.factor, &element->master,
          element->states);
  element->master = OneNan(element->master);
  for (int s = 0; s < F::kStates; ++s) {
    element->states[s] = OneNan(element->states[s]);
  }
}

}  // namespace tessera
#endif  // OPTIM_CUDA_STEP_ELEMENT_H_
