// Converts tokens as files hold them to the int64 or int32 of embeddings and
// losses.
#ifndef DATA_TEXT_TOKEN_WIDEN_H_
#define DATA_TEXT_TOKEN_WIDEN_H_

#include <cstdint>

#include "base/isa.h"

namespace tessera {

// WidenTokens prefetches this far ahead of what it reads.
inline constexpr int64_t kWidenAheadBytes = 4096;

// Sets out[i] = in[i] for i in [0, count), modulo 2^32 for int32, and returns
// the largest of in[i], 0 if count is 0. So a check of the vocabulary costs one
// comparison a call. `next` is what will be read afterwards: its first bytes,
// kWidenAheadBytes or as many as `in` has, are prefetched meanwhile; nullptr:
// none. (It is never read: any address will do.) Uses AVX-512, AVX2, or plain
// C++, with the same results. In: uint8, 16, 32; Out: int32, int64. Buffers may
// not overlap; `in` is aligned to its type.
template <typename In, typename Out>
uint32_t WidenTokens(const In* in, int64_t count, Out* out,
                     const void* next = nullptr, Isa isa = BestIsa());

// Prefetches the first bytes of `first`, as WidenTokens does for its `next`.
void PrefetchTokens(const void* first, int64_t bytes);

}  // namespace tessera
#endif  // DATA_TEXT_TOKEN_WIDEN_H_
