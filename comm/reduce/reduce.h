// ReduceInOrder: out[i] = sources[0][i] op sources[1][i] op ..., from left to
// right, the same bits with any instruction set.
//
// float16 and bfloat16 are folded in float32 and rounded once, to nearest even.
// Integers wrap; their average is truncated toward zero. Of bool both are "or".
//
// The code is compiled for the instruction sets of base/isa.h.
#ifndef COMM_REDUCE_REDUCE_H_
#define COMM_REDUCE_REDUCE_H_

#include <cstdint>

#include "base/isa.h"

namespace tessera {

enum class ElementType : int32_t {
  kBool,
  kUInt8,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
};
inline constexpr int kNumElementTypes = 10;

enum class ReduceOp : int32_t { kSum, kAverage };
inline constexpr int kNumReduceOps = 2;

int64_t ElementBytes(ElementType type);
const char* ElementTypeName(ElementType type);  // "float32"

// `out` is apart from each source or is that source. 1 <= num_sources. LOCAL.
void ReduceInOrder(ElementType type, ReduceOp op, void* out,
                   const void* const* sources, int num_sources, int64_t numel,
                   Isa isa = BestIsa());

// A sum of float16 or bfloat16 in several calls, which together give the bits
// of one ReduceInOrder over all sources: `before` is what the call before has
// left, in float32 (null in the first). Leaves float32 in `out`, elements of
// `type` in the last. `out` may be a source of the last.
void PartialSumInOrder(ElementType type, const float* before,
                       const void* const* sources, int num_sources, bool last,
                       void* out, int64_t numel, Isa isa = BestIsa());

}  // namespace tessera
#endif  // COMM_REDUCE_REDUCE_H_
