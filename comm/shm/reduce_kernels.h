// The loops of ReduceInOrder. Included by one .cc per instruction set, each of
// which sets TESSERA_SHM_ISA to a name of its own and is compiled with that
// set's flags. Nothing here may come from a shared template or inline function:
// the linker could take its AVX-512 copy for all.
#include <cstdint>
#include <type_traits>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "comm/shm/reduce.h"

namespace tessera::shm::TESSERA_SHM_ISA {
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
struct Product {
  template <typename T>
  static T Of(T a, T b) {
    using U = typename Unsigned<T>::Type;
    return static_cast<T>(static_cast<U>(a) * static_cast<U>(b));
  }
  static bool Of(bool a, bool b) { return a & b; }
};
struct Min {
  template <typename T>
  static T Of(T a, T b) {
    return b < a || b != b ? b : a;
  }
};
struct Max {
  template <typename T>
  static T Of(T a, T b) {
    return b > a || b != b ? b : a;
  }
};

// ---- loops

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

constexpr int64_t kBlock = 1024;  // elements; stays in the first cache

template <typename T, typename A>
inline void LoadBlock(const T* from, int64_t n, A* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = Load(from[i]);
}
template <typename T, typename A>
inline void StoreBlock(const A* from, int64_t n, T* to) {
  for (int64_t i = 0; i < n; ++i) Store(from[i], &to[i]);
}
#if defined(__F16C__)
inline void LoadBlock(const Half* from, int64_t n, float* to) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i halves =
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(halves));
  }
  for (; i < n; ++i) to[i] = Load(from[i]);
}
inline void StoreBlock(const float* from, int64_t n, Half* to) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i halves =
        _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), halves);
  }
  for (; i < n; ++i) Store(from[i], &to[i]);
}
#endif

template <typename Op, typename T>
inline void FoldTwo(T* out, const T* a, const T* b, int64_t numel) {
#pragma clang loop vectorize(assume_safety)
  for (int64_t i = 0; i < numel; ++i) out[i] = Op::Of(a[i], b[i]);
}
template <typename Op, typename T>
inline void FoldThree(T* out, const T* a, const T* b, const T* c,
                      int64_t numel) {
#pragma clang loop vectorize(assume_safety)
  for (int64_t i = 0; i < numel; ++i) {
    out[i] = Op::Of(Op::Of(a[i], b[i]), c[i]);
  }
}

// Types that are folded in themselves: nothing is loaded that is not used.
template <typename Op, typename T>
void FoldSame(T* out, const void* const* sources, int num_sources,
              int64_t numel) {
  const auto source = [&](int s, int64_t begin) {
    return static_cast<const T*>(sources[s]) + begin;
  };
  if (num_sources == 2) {
    return FoldTwo<Op>(out, source(0, 0), source(1, 0), numel);
  }
  T sum[kBlock];
  for (int64_t begin = 0; begin < numel; begin += kBlock) {
    const int64_t n = numel - begin < kBlock ? numel - begin : kBlock;
    // `out` may be a source: it is written when all have been read.
    const T* left = source(0, begin);
    int s = 1;
    for (; s + 2 < num_sources; s += 2) {
      FoldThree<Op>(sum, left, source(s, begin), source(s + 1, begin), n);
      left = sum;
    }
    if (s + 1 < num_sources) {
      FoldThree<Op>(out + begin, left, source(s, begin), source(s + 1, begin),
                    n);
    } else {
      FoldTwo<Op>(out + begin, left, source(s, begin), n);
    }
  }
}

template <typename T, typename Op, bool kAverage>
void Fold(void* out_bytes, const void* const* sources, int num_sources,
          int64_t numel) {
  using A = typename AccumulatorOf<T>::Type;
  T* const out = static_cast<T*>(out_bytes);
  if constexpr (sizeof(T) == sizeof(A) && !kAverage && sizeof(T) > 1) {
    if (num_sources >= 2) {
      return FoldSame<Op>(out, sources, num_sources, numel);
    }
  }
  if constexpr (std::is_floating_point_v<T> && kAverage) {
    if (num_sources == 2) {
      return FoldTwo<HalfOfSum>(out, static_cast<const T*>(sources[0]),
                                static_cast<const T*>(sources[1]), numel);
    }
  }
  const A divisor = static_cast<A>(num_sources);
  A sum[kBlock], next[kBlock];
  for (int64_t begin = 0; begin < numel; begin += kBlock) {
    const int64_t n = numel - begin < kBlock ? numel - begin : kBlock;
    LoadBlock(static_cast<const T*>(sources[0]) + begin, n, sum);
    for (int s = 1; s < num_sources; ++s) {
      LoadBlock(static_cast<const T*>(sources[s]) + begin, n, next);
      for (int64_t i = 0; i < n; ++i) sum[i] = Op::Of(sum[i], next[i]);
    }
    if (kAverage) {
      for (int64_t i = 0; i < n; ++i) sum[i] = static_cast<A>(sum[i] / divisor);
    }
    StoreBlock(sum, n, out + begin);
  }
}

// SumPartInOrder of T.
template <typename T>
void FoldPart(const float* before, const void* const* sources, int num_sources,
              bool last, void* out, int64_t numel) {
  float sum[kBlock], next[kBlock];
  for (int64_t begin = 0; begin < numel; begin += kBlock) {
    const int64_t n = numel - begin < kBlock ? numel - begin : kBlock;
    int s = 0;
    if (before != nullptr) {
      LoadBlock(before + begin, n, sum);
    } else {
      LoadBlock(static_cast<const T*>(sources[s++]) + begin, n, sum);
    }
    for (; s < num_sources; ++s) {
      LoadBlock(static_cast<const T*>(sources[s]) + begin, n, next);
      for (int64_t i = 0; i < n; ++i) sum[i] = Sum::Of(sum[i], next[i]);
    }
    if (last) {
      StoreBlock(sum, n, static_cast<T*>(out) + begin);
    } else {
      StoreBlock(sum, n, static_cast<float*>(out) + begin);
    }
  }
}

template <typename T>
void FoldBy(ReduceOp op, void* out, const void* const* sources, int num_sources,
            int64_t numel) {
  switch (op) {
    case ReduceOp::kSum:
      return Fold<T, Sum, false>(out, sources, num_sources, numel);
    case ReduceOp::kAverage:
      return Fold<T, Sum, true>(out, sources, num_sources, numel);
    case ReduceOp::kMin:
      return Fold<T, Min, false>(out, sources, num_sources, numel);
    case ReduceOp::kMax:
      return Fold<T, Max, false>(out, sources, num_sources, numel);
    case ReduceOp::kProduct:
      return Fold<T, Product, false>(out, sources, num_sources, numel);
  }
}

}  // namespace

void Reduce(ElementType type, ReduceOp op, void* out,
            const void* const* sources, int num_sources, int64_t numel) {
  switch (type) {
    case ElementType::kBool:
      // "or", and "and" for kProduct and kMin.
      if (op == ReduceOp::kAverage) op = ReduceOp::kSum;
      if (op == ReduceOp::kMin) op = ReduceOp::kProduct;
      if (op == ReduceOp::kMax) op = ReduceOp::kSum;
      return FoldBy<Bool>(op, out, sources, num_sources, numel);
    case ElementType::kUInt8:
      return FoldBy<uint8_t>(op, out, sources, num_sources, numel);
    case ElementType::kInt8:
      return FoldBy<int8_t>(op, out, sources, num_sources, numel);
    case ElementType::kInt16:
      return FoldBy<int16_t>(op, out, sources, num_sources, numel);
    case ElementType::kInt32:
      return FoldBy<int32_t>(op, out, sources, num_sources, numel);
    case ElementType::kInt64:
      return FoldBy<int64_t>(op, out, sources, num_sources, numel);
    case ElementType::kFloat16:
      return FoldBy<Half>(op, out, sources, num_sources, numel);
    case ElementType::kBFloat16:
      return FoldBy<BFloat16>(op, out, sources, num_sources, numel);
    case ElementType::kFloat32:
      return FoldBy<float>(op, out, sources, num_sources, numel);
    case ElementType::kFloat64:
      return FoldBy<double>(op, out, sources, num_sources, numel);
  }
}

void SumPart(ElementType type, const float* before, const void* const* sources,
             int num_sources, bool last, void* out, int64_t numel) {
  return type == ElementType::kFloat16
             ? FoldPart<Half>(before, sources, num_sources, last, out, numel)
             : FoldPart<BFloat16>(before, sources, num_sources, last, out,
                                  numel);
}

}  // namespace tessera::shm::TESSERA_SHM_ISA
