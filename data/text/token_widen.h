// Tokens as files hold them become the int64 of embeddings and losses.
#ifndef DATA_TEXT_TOKEN_WIDEN_H_
#define DATA_TEXT_TOKEN_WIDEN_H_

#include <cstdint>

#include "base/isa.h"

namespace tessera {

// out[i] = in[i] for i in [0, count); returns the largest of them, 0 of none.
// So a check of the vocabulary costs one comparison a call. AVX2, or plain C++
// for Isa::kPortable, with the same results. Buffers may not overlap; `in` is
// aligned to its type.
uint32_t WidenTokens(const uint8_t* in, int64_t count, int64_t* out,
                     Isa isa = BestIsa());
uint32_t WidenTokens(const uint16_t* in, int64_t count, int64_t* out,
                     Isa isa = BestIsa());
uint32_t WidenTokens(const uint32_t* in, int64_t count, int64_t* out,
                     Isa isa = BestIsa());

}  // namespace tessera
#endif  // DATA_TEXT_TOKEN_WIDEN_H_
