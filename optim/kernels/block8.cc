#include "optim/kernels/block8.h"

#include "base/isa.h"

namespace tessera {

// step_loops.cc.
#define TESSERA_BLOCK8_DECLARE(isa)                               \
  namespace step_##isa {                                          \
    void Decode(const char* blocks, int64_t numel, bool, float*); \
    void Encode(const float*, int64_t numel, bool, char* blocks); \
  }
TESSERA_BLOCK8_DECLARE(portable)
TESSERA_BLOCK8_DECLARE(avx2)
TESSERA_BLOCK8_DECLARE(avx512)
#undef TESSERA_BLOCK8_DECLARE

void DecodeBlock8(const void* blocks, int64_t numel, bool non_negative,
                  float* elements) {
  const auto* const from = static_cast<const char*>(blocks);
  switch (BestIsa()) {
    case Isa::kPortable:
      return step_portable::Decode(from, numel, non_negative, elements);
    case Isa::kAvx2:
      return step_avx2::Decode(from, numel, non_negative, elements);
    case Isa::kAvx512:
      return step_avx512::Decode(from, numel, non_negative, elements);
  }
}

void EncodeBlock8(const float* elements, int64_t numel, bool non_negative,
                  void* blocks) {
  auto* const to = static_cast<char*>(blocks);
  switch (BestIsa()) {
    case Isa::kPortable:
      return step_portable::Encode(elements, numel, non_negative, to);
    case Isa::kAvx2:
      return step_avx2::Encode(elements, numel, non_negative, to);
    case Isa::kAvx512:
      return step_avx512::Encode(elements, numel, non_negative, to);
  }
}

}  // namespace tessera
