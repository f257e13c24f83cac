// Why two loops over a block: the largest is found in lanes as narrow as the
// tokens, eight times as many as the int64 of the copy; the block is in the
// first cache when the second loop reads it.
#include "data/text/token_widen.h"

#include <algorithm>

namespace tessera {
namespace {

constexpr int64_t kBlock = 1024;  // tokens

template <typename T>
inline __attribute__((always_inline)) uint32_t Widen(const T* __restrict in,
                                                     int64_t count,
                                                     int64_t* __restrict out) {
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
__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))) uint32_t
WidenAvx512(const T* in, int64_t count, int64_t* out) {
  return Widen(in, count, out);
}

template <typename T>
__attribute__((target("avx2"))) uint32_t WidenAvx2(const T* in, int64_t count,
                                                   int64_t* out) {
  return Widen(in, count, out);
}

template <typename T>
uint32_t WidenBy(Isa isa, const T* in, int64_t count, int64_t* out) {
  switch (isa) {
    case Isa::kAvx512:
      return WidenAvx512(in, count, out);
    case Isa::kAvx2:
      return WidenAvx2(in, count, out);
    case Isa::kPortable:
      break;
  }
  return Widen(in, count, out);
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
