#include "comm/reduce/reduce.h"

#include "base/check.h"

namespace tessera {

#define TESSERA_REDUCE_DECLARE(isa)                                            \
  namespace isa {                                                              \
  void Reduce(ElementType, ReduceOp, void*, const void* const*, int, int64_t); \
  void PartialSum(ElementType, const float*, const void* const*, int, bool,    \
                  void*, int64_t);                                             \
  }
TESSERA_REDUCE_DECLARE(portable)
TESSERA_REDUCE_DECLARE(avx2)
TESSERA_REDUCE_DECLARE(avx512)
#undef TESSERA_REDUCE_DECLARE

int64_t ElementBytes(ElementType type) {
  static constexpr int64_t kBytes[kNumElementTypes] = {1, 1, 1, 2, 4,
                                                       8, 2, 2, 4, 8};
  return kBytes[static_cast<int>(type)];
}

const char* ElementTypeName(ElementType type) {
  static constexpr const char* kNames[kNumElementTypes] = {
      "bool",  "uint8",   "int8",     "int16",   "int32",
      "int64", "float16", "bfloat16", "float32", "float64"};
  return kNames[static_cast<int>(type)];
}

void ReduceInOrder(ElementType type, ReduceOp op, void* out,
                   const void* const* sources, int num_sources, int64_t numel,
                   Isa isa) {
  TESSERA_CHECK_GE(num_sources, 1);
  switch (isa) {
    case Isa::kPortable:
      return portable::Reduce(type, op, out, sources, num_sources, numel);
    case Isa::kAvx2:
      return avx2::Reduce(type, op, out, sources, num_sources, numel);
    case Isa::kAvx512:
      return avx512::Reduce(type, op, out, sources, num_sources, numel);
  }
}

void PartialSumInOrder(ElementType type, const float* before,
                       const void* const* sources, int num_sources, bool last,
                       void* out, int64_t numel, Isa isa) {
  TESSERA_CHECK_GE(num_sources, 1);
  TESSERA_CHECK(type == ElementType::kFloat16 ||
                type == ElementType::kBFloat16);
  switch (isa) {
    case Isa::kPortable:
      return portable::PartialSum(type, before, sources, num_sources, last, out,
                                  numel);
    case Isa::kAvx2:
      return avx2::PartialSum(type, before, sources, num_sources, last, out,
                              numel);
    case Isa::kAvx512:
      return avx512::PartialSum(type, before, sources, num_sources, last, out,
                                numel);
  }
}

}  // namespace tessera
