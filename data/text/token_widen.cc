// Why by hand: a compiler makes one loop of lanes as wide as the widest type,
// so that the largest costs as much as the copy, or two loops, of which the
// second reads again. Here a line of 64 bytes is read once, the largest is
// found in lanes as narrow as the tokens, and a line further on is asked for:
// the stores, two to eight times as many bytes, keep the processor from looking
// ahead by itself.
#include "data/text/token_widen.h"

#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <iterator>

namespace tessera {
namespace {

#define TESSERA_AVX2 __attribute__((target("avx2")))

constexpr int64_t kLine = 64;     // bytes
constexpr int64_t kAhead = 1024;  // bytes

template <typename T>
uint32_t Widen(const T* in, int64_t count, int64_t* out, T largest = 0) {
  for (int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, in[i]);
    out[i] = static_cast<int64_t>(in[i]);
  }
  return largest;
}

TESSERA_AVX2 __m256i Load(const void* from) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(from));
}

TESSERA_AVX2 __m256i Max(__m256i a, __m256i b, const uint8_t*) {
  return _mm256_max_epu8(a, b);
}
TESSERA_AVX2 __m256i Max(__m256i a, __m256i b, const uint16_t*) {
  return _mm256_max_epu16(a, b);
}
TESSERA_AVX2 __m256i Max(__m256i a, __m256i b, const uint32_t*) {
  return _mm256_max_epu32(a, b);
}

// Four tokens.
TESSERA_AVX2 __m256i WidenFour(const uint8_t* in) {
  int32_t four;
  std::memcpy(&four, in, sizeof(four));
  return _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
}
TESSERA_AVX2 __m256i WidenFour(const uint16_t* in) {
  return _mm256_cvtepu16_epi64(
      _mm_loadl_epi64(reinterpret_cast<const __m128i*>(in)));
}
TESSERA_AVX2 __m256i WidenFour(const uint32_t* in) {
  return _mm256_cvtepu32_epi64(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(in)));
}

template <typename T>
TESSERA_AVX2 uint32_t WidenAvx2(const T* in, int64_t count, int64_t* out) {
  constexpr int64_t kTokens = kLine / int64_t{sizeof(T)};
  __m256i lanes = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + kTokens <= count; i += kTokens) {
    // Behind the end of a mapping this asks for nothing, and does no harm.
    _mm_prefetch(reinterpret_cast<const char*>(in + i) + kAhead, _MM_HINT_T0);
    lanes = Max(lanes, Load(in + i), in);
    lanes = Max(lanes, Load(in + i + kTokens / 2), in);
#pragma clang loop unroll(full)
    for (int64_t k = 0; k < kTokens; k += 4) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i + k),
                          WidenFour(in + i + k));
    }
  }
  T of_lanes[kLine / 2 / sizeof(T)];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(of_lanes), lanes);
  return Widen(in + i, count - i, out + i,
               *std::max_element(std::begin(of_lanes), std::end(of_lanes)));
}

// The same by blocks that stay in a cache, for compilers: two loops, of narrow
// lanes and of wide ones.
template <typename T>
uint32_t WidenPortable(const T* in, int64_t count, int64_t* out) {
  constexpr int64_t kBlock = 1024;
  T largest = 0;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(count, begin + kBlock);
    T of_block = 0;
    for (int64_t i = begin; i < end; ++i) of_block = std::max(of_block, in[i]);
    largest = std::max(largest, of_block);
    for (int64_t i = begin; i < end; ++i) out[i] = static_cast<int64_t>(in[i]);
  }
  return largest;
}

template <typename T>
uint32_t WidenBy(Isa isa, const T* in, int64_t count, int64_t* out) {
  return isa == Isa::kPortable ? WidenPortable(in, count, out)
                               : WidenAvx2(in, count, out);
}

}  // namespace

uint32_t WidenTokens(const uint8_t* in, int64_t count, int64_t* out, Isa isa) {
  return WidenBy(isa, in, count, out);
}
uint32_t WidenTokens(const uint16_t* in, int64_t count, int64_t* out, Isa isa) {
  return WidenBy(isa, in, count, out);
}
uint32_t WidenTokens(const uint32_t* in, int64_t count, int64_t* out, Isa isa) {
  return WidenBy(isa, in, count, out);
}

}  // namespace tessera
