// This is written by hand because a compiler makes one loop of lanes as wide as
// the widest type, so that finding the largest costs as much as the copy, or
// two loops, the second of which reads again. Here a line of 64 bytes is read
// once, the largest is found in lanes as narrow as the tokens, and a line
// further on is prefetched: the stores, up to eight times as many bytes, keep
// the processor from looking ahead by itself.
#include "data/text/token_widen.h"

#include <immintrin.h>

#include <algorithm>
#include <utility>

namespace tessera {
namespace {

#define TESSERA_AVX2 __attribute__((target("avx2")))
#define TESSERA_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))

constexpr int64_t kLine = 64;  // bytes

// ---- plain C++

template <typename In, typename Out>
uint32_t Widen(const In* in, int64_t count, Out* out, In largest = 0) {
  for (int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, in[i]);
    out[i] = static_cast<Out>(in[i]);
  }
  return largest;
}

// Works in blocks that stay in a cache, with two loops for the compiler, of
// narrow lanes and of wide ones.
template <typename In, typename Out>
uint32_t WidenPortable(const In* in, int64_t count, Out* out) {
  constexpr int64_t kBlock = 1024;
  In largest = 0;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(count, begin + kBlock);
    In of_block = 0;
    for (int64_t i = begin; i < end; ++i) of_block = std::max(of_block, in[i]);
    largest = std::max(largest, of_block);
    for (int64_t i = begin; i < end; ++i) out[i] = static_cast<Out>(in[i]);
  }
  return largest;
}

// ---- AVX2: 16 bytes are read and widened by shifts in a register. (Reading as
// many bytes as fill a vector, as AVX-512 does below, would be up to four times
// as many reads, and slower.)

TESSERA_AVX2 __m256i Max(__m256i a, __m256i b, const uint8_t*) {
  return _mm256_max_epu8(a, b);
}
TESSERA_AVX2 __m256i Max(__m256i a, __m256i b, const uint16_t*) {
  return _mm256_max_epu16(a, b);
}
TESSERA_AVX2 __m256i Max(__m256i a, __m256i b, const uint32_t*) {
  return _mm256_max_epu32(a, b);
}

TESSERA_AVX2 __m128i Max(__m128i a, __m128i b, const uint8_t*) {
  return _mm_max_epu8(a, b);
}
TESSERA_AVX2 __m128i Max(__m128i a, __m128i b, const uint16_t*) {
  return _mm_max_epu16(a, b);
}
TESSERA_AVX2 __m128i Max(__m128i a, __m128i b, const uint32_t*) {
  return _mm_max_epu32(a, b);
}

// Returns the largest of all lanes.
template <typename In>
TESSERA_AVX2 In Largest(__m256i lanes, const In* in) {
  __m128i v = Max(_mm256_castsi256_si128(lanes),
                  _mm256_extracti128_si256(lanes, 1), in);
  v = Max(v, _mm_srli_si128(v, 8), in);
  v = Max(v, _mm_srli_si128(v, 4), in);
  if constexpr (sizeof(In) <= 2) v = Max(v, _mm_srli_si128(v, 2), in);
  if constexpr (sizeof(In) == 1) v = Max(v, _mm_srli_si128(v, 1), in);
  return static_cast<In>(_mm_cvtsi128_si32(v));
}

TESSERA_AVX2 __m256i Load32(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}
TESSERA_AVX2 void Store32(void* to, __m256i lanes) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), lanes);
}

// Returns the first tokens of `v`, as many as fill a vector.
TESSERA_AVX2 __m256i First(__m128i v, const uint8_t*, const int64_t*) {
  return _mm256_cvtepu8_epi64(v);
}
TESSERA_AVX2 __m256i First(__m128i v, const uint8_t*, const int32_t*) {
  return _mm256_cvtepu8_epi32(v);
}
TESSERA_AVX2 __m256i First(__m128i v, const uint16_t*, const int64_t*) {
  return _mm256_cvtepu16_epi64(v);
}
TESSERA_AVX2 __m256i First(__m128i v, const uint16_t*, const int32_t*) {
  return _mm256_cvtepu16_epi32(v);
}
TESSERA_AVX2 __m256i First(__m128i v, const uint32_t*, const int64_t*) {
  return _mm256_cvtepu32_epi64(v);
}

template <typename In, typename Out, int... kVector>
TESSERA_AVX2 void WidenSixteen(const In* in, Out* out,
                               std::integer_sequence<int, kVector...>) {
  constexpr int kBytes = 32 * int{sizeof(In)} / int{sizeof(Out)};
  constexpr int kTokens = kBytes / int{sizeof(In)};
  const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in));
  (Store32(out + kVector * kTokens,
           First(_mm_srli_si128(v, kVector * kBytes), in, out)),
   ...);
}

template <typename In, typename Out>
TESSERA_AVX2 uint32_t WidenAvx2(const In* in, int64_t count, Out* out,
                                const char* ahead) {
  constexpr int64_t kTokens = kLine / int64_t{sizeof(In)};
  __m256i lanes = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + kTokens <= count; i += kTokens) {
    _mm_prefetch(ahead + i * int64_t{sizeof(In)}, _MM_HINT_T0);
    const __m256i low = Load32(in + i), high = Load32(in + i + kTokens / 2);
    lanes = Max(lanes, Max(low, high, in), in);
    if constexpr (sizeof(In) == sizeof(Out)) {
      Store32(out + i, low);
      Store32(out + i + kTokens / 2, high);
    } else {
      using Vectors =
          std::make_integer_sequence<int, sizeof(Out) / sizeof(In) / 2>;
      for (int64_t k = i; k < i + kTokens; k += kTokens / 4) {
        WidenSixteen(in + k, out + k, Vectors());
      }
    }
  }
  return Widen(in + i, count - i, out + i, Largest(lanes, in));
}

// ---- AVX-512

TESSERA_AVX512 __m512i Max(__m512i a, __m512i b, const uint8_t*) {
  return _mm512_max_epu8(a, b);
}
TESSERA_AVX512 __m512i Max(__m512i a, __m512i b, const uint16_t*) {
  return _mm512_max_epu16(a, b);
}
TESSERA_AVX512 __m512i Max(__m512i a, __m512i b, const uint32_t*) {
  return _mm512_max_epu32(a, b);
}

// Returns as many tokens from `in` on as fill a vector.
TESSERA_AVX512 __m512i WidenVector(const uint8_t* in, const int64_t*) {
  return _mm512_cvtepu8_epi64(
      _mm_loadl_epi64(reinterpret_cast<const __m128i*>(in)));
}
TESSERA_AVX512 __m512i WidenVector(const uint8_t* in, const int32_t*) {
  return _mm512_cvtepu8_epi32(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
}
TESSERA_AVX512 __m512i WidenVector(const uint16_t* in, const int64_t*) {
  return _mm512_cvtepu16_epi64(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
}
TESSERA_AVX512 __m512i WidenVector(const uint16_t* in, const int32_t*) {
  return _mm512_cvtepu16_epi32(Load32(in));
}
TESSERA_AVX512 __m512i WidenVector(const uint32_t* in, const int64_t*) {
  return _mm512_cvtepu32_epi64(Load32(in));
}
TESSERA_AVX512 __m512i WidenVector(const uint32_t* in, const int32_t*) {
  return _mm512_loadu_si512(in);
}

template <typename In, typename Out>
TESSERA_AVX512 uint32_t WidenAvx512(const In* in, int64_t count, Out* out,
                                    const char* ahead) {
  constexpr int64_t kTokens = kLine / int64_t{sizeof(In)};
  constexpr int64_t kVector = kLine / int64_t{sizeof(Out)};
  __m512i lanes = _mm512_setzero_si512();
  int64_t i = 0;
  for (; i + kTokens <= count; i += kTokens) {
    _mm_prefetch(ahead + i * int64_t{sizeof(In)}, _MM_HINT_T0);
    lanes = Max(lanes, _mm512_loadu_si512(in + i), in);
    for (int64_t k = i; k < i + kTokens; k += kVector) {
      _mm512_storeu_si512(out + k, WidenVector(in + k, out));
    }
  }
  return Widen(in + i, count - i, out + i,
               Largest(Max(_mm512_castsi512_si256(lanes),
                           _mm512_extracti64x4_epi64(lanes, 1), in),
                       in));
}

// While it reads in[i], it prefetches ahead + i * sizeof(In).
template <typename In, typename Out>
uint32_t WidenBy(Isa isa, const In* in, int64_t count, Out* out,
                 const void* ahead) {
  if (count == 0) return 0;
  const auto* const bytes = static_cast<const char*>(ahead);
  if (isa == Isa::kAvx512) return WidenAvx512(in, count, out, bytes);
  if (isa == Isa::kAvx2) return WidenAvx2(in, count, out, bytes);
  return WidenPortable(in, count, out);
}

}  // namespace

template <typename In, typename Out>
uint32_t WidenTokens(const In* in, int64_t count, Out* out, const void* next,
                     Isa isa) {
  // The last tokens are as many as are prefetched of `next`.
  const int64_t last = std::min(count, kWidenAheadBytes / int64_t{sizeof(In)});
  const int64_t first = count - last;
  const uint32_t largest = WidenBy(isa, in, first, out, in + last);
  // What was read had been prefetched: prefetching it again does nothing.
  in += first;
  return std::max(largest, WidenBy(isa, in, last, out + first,
                                   next == nullptr ? in : next));
}

void PrefetchTokens(const void* first, int64_t bytes) {
  for (int64_t i = 0; i < std::min(bytes, kWidenAheadBytes); i += kLine) {
    _mm_prefetch(static_cast<const char*>(first) + i, _MM_HINT_T0);
  }
}

#define TESSERA_WIDEN(In, Out)                                     \
  template uint32_t WidenTokens<In, Out>(const In*, int64_t, Out*, \
                                         const void*, Isa)
TESSERA_WIDEN(uint8_t, int32_t);
TESSERA_WIDEN(uint8_t, int64_t);
TESSERA_WIDEN(uint16_t, int32_t);
TESSERA_WIDEN(uint16_t, int64_t);
TESSERA_WIDEN(uint32_t, int32_t);
TESSERA_WIDEN(uint32_t, int64_t);
#undef TESSERA_WIDEN

}  // namespace tessera
