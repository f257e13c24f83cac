// The elements of reduce_kernels.h, what they are folded in, and the
// operations; once for each instruction set, as the loops.
#include <cstdint>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace tessera::TESSERA_REDUCE_ISA {
namespace {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
struct Bool {
  uint8_t bits;
};

inline uint32_t BitsOf(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return bits;
}
inline float FloatOf(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return x;
}

// ---- an element and what it is folded in

inline float Load(BFloat16 x) {
  return FloatOf(static_cast<uint32_t>(x.bits) << 16);
}
inline void Store(float x, BFloat16* out) {
  const uint32_t bits = BitsOf(x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  out->bits = x != x ? 0x7fc0 : static_cast<uint16_t>(rounded);
}

#if defined(__F16C__)
// The hardware's conversions, which a compiler does not vectorise by itself:
// see LoadBlock and StoreBlock.
inline float Load(Half x) { return _cvtsh_ss(x.bits); }
inline void Store(float x, Half* out) {
  out->bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
}
#else
inline float Load(Half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  const uint32_t rest = x.bits & 0x7fff;
  if (rest > 0x7c00) return FloatOf(sign | 0x7fc00000 | rest << 13);  // NaN
  // Exponent and mantissa in place, the exponent's bias off by 112: subnormals
  // become right too, since the product is exact.
  const float magnitude = rest == 0x7c00
                              ? FloatOf(0x7f800000)
                              : FloatOf(rest << 13) * FloatOf((254 - 15) << 23);
  return FloatOf(sign | BitsOf(magnitude));
}
inline void Store(float x, Half* out) {
  const uint32_t bits = BitsOf(x);
  const uint32_t sign = bits >> 16 & 0x8000;
  const uint32_t rest = bits & 0x7fffffff;
  uint32_t half;
  if (rest > 0x7f800000) {
    half = 0x7e00 | (rest >> 13 & 0x3ff);  // NaN, as the hardware does it
  } else if (rest >= 0x477ff000) {
    half = 0x7c00;  // rounds to infinity
  } else if (rest >= 0x38800000) {
    half = (rest + 0xfff + (rest >> 13 & 1) - 0x38000000) >> 13;
  } else {
    // Adding 0.5 makes the sum's last bit that of the smallest subnormal.
    half = BitsOf(FloatOf(rest) + 0.5f) - BitsOf(0.5f);
  }
  out->bits = static_cast<uint16_t>(sign | half);
}
#endif

inline bool Load(Bool x) { return x.bits != 0; }
inline void Store(bool x, Bool* out) { out->bits = x; }
template <typename T>
inline T Load(T x) {
  return x;
}
template <typename T>
inline void Store(T x, T* out) {
  *out = x;
}

// ---- operations

// Integers wrap: they are computed without a sign.
template <typename T>
struct Unsigned {
  using Type = T;
};
template <>
struct Unsigned<int8_t> {
  using Type = uint8_t;
};
template <>
struct Unsigned<int16_t> {
  using Type = uint32_t;  // uint16_t would be promoted to int
};
template <>
struct Unsigned<int32_t> {
  using Type = uint32_t;
};
template <>
struct Unsigned<int64_t> {
  using Type = uint64_t;
};

struct Sum {
  template <typename T>
  static T Of(T a, T b) {
    using U = typename Unsigned<T>::Type;
    return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
  }
  static bool Of(bool a, bool b) { return a | b; }
};
// The average of two.
struct HalfOfSum {
  template <typename T>
  static T Of(T a, T b) {
    return (a + b) / 2;
  }
};

template <typename T>
struct AccumulatorOf {
  using Type = T;
};
template <>
struct AccumulatorOf<Half> {
  using Type = float;
};
template <>
struct AccumulatorOf<BFloat16> {
  using Type = float;
};
template <>
struct AccumulatorOf<Bool> {
  using Type = bool;
};

}  // namespace
}  // namespace tessera::TESSERA_REDUCE_ISA
