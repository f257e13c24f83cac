// The loops of ReduceInOrder. Included by one .cc per instruction set, each of
// which sets TESSERA_REDUCE_ISA to a name of its own and is compiled with that
// set's flags. Nothing here may come from a shared template or inline function:
// the linker could take its AVX-512 copy for all.
#include <cstdint>
#include <type_traits>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "comm/reduce/reduce.h"
#include "comm/reduce/reduce_elements.h"

namespace tessera::TESSERA_REDUCE_ISA {
namespace {

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

#if defined(__x86_64__)
// From so many elements on, sums that go elsewhere are written past the caches:
// what lay there is not read first, and what lies there is not displaced.
constexpr int64_t kLarge = 1 << 18;

using Line = float __attribute__((vector_size(64)));
constexpr int64_t kLineNumel = 16;

// `out` is no source.
template <typename Op>
void FoldTwoPastCaches(float* out, const float* a, const float* b,
                       int64_t numel) {
  // Elements before the first full line.
  auto i = static_cast<int64_t>(-reinterpret_cast<uint64_t>(out) / 4 % 16);
  FoldTwo<Op>(out, a, b, i);
  for (; i + kLineNumel <= numel; i += kLineNumel) {
    Line folded;
    for (int64_t j = 0; j < kLineNumel; ++j) {
      folded[j] = Op::Of(a[i + j], b[i + j]);
    }
    __builtin_nontemporal_store(folded, reinterpret_cast<Line*>(out + i));
  }
  FoldTwo<Op>(out + i, a + i, b + i, numel - i);
  __builtin_ia32_sfence();  // before another rank is told
}
#endif

// All elements there are.
template <typename Op, typename T>
inline void FoldAllOfTwo(T* out, const T* a, const T* b, int64_t numel) {
#if defined(__x86_64__)
  if constexpr (std::is_same_v<T, float>) {
    const bool aligned = reinterpret_cast<uint64_t>(out) % sizeof(T) == 0;
    if (numel >= kLarge && out != a && out != b && aligned) {
      return FoldTwoPastCaches<Op>(out, a, b, numel);
    }
  }
#endif
  FoldTwo<Op>(out, a, b, numel);
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
    return FoldAllOfTwo<Op>(out, source(0, 0), source(1, 0), numel);
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
      return FoldAllOfTwo<HalfOfSum>(out, static_cast<const T*>(sources[0]),
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

// PartialSumInOrder of T.
template <typename T>
void FoldPartial(const float* before, const void* const* sources,
                 int num_sources, bool last, void* out, int64_t numel) {
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
  }
}

}  // namespace

void Reduce(ElementType type, ReduceOp op, void* out,
            const void* const* sources, int num_sources, int64_t numel) {
  switch (type) {
    case ElementType::kBool:
      return FoldBy<Bool>(ReduceOp::kSum, out, sources, num_sources, numel);
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

void PartialSum(ElementType type, const float* before,
                const void* const* sources, int num_sources, bool last,
                void* out, int64_t numel) {
  return type == ElementType::kFloat16
             ? FoldPartial<Half>(before, sources, num_sources, last, out, numel)
             : FoldPartial<BFloat16>(before, sources, num_sources, last, out,
                                     numel);
}

}  // namespace tessera::TESSERA_REDUCE_ISA
