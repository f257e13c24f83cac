#include "comm/shm/reduce.h"

#include <cpuid.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/check.h"

namespace tessera::shm {

#define TESSERA_SHM_DECLARE(isa)                                               \
  namespace isa {                                                              \
  void Reduce(ElementType, ReduceOp, void*, const void* const*, int, int64_t); \
  void SumPart(ElementType, const float*, const void* const*, int, bool,       \
               void*, int64_t);                                                \
  }
TESSERA_SHM_DECLARE(portable)
TESSERA_SHM_DECLARE(avx2)
TESSERA_SHM_DECLARE(avx512)
#undef TESSERA_SHM_DECLARE

namespace {

bool Has(Isa isa) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  __get_cpuid(1, &a, &b, &c, &d);
  const bool avx2 = __builtin_cpu_supports("avx2") && (c & bit_F16C) != 0;
  switch (isa) {
    case Isa::kPortable:
      return true;
    case Isa::kAvx2:
      return avx2;
    case Isa::kAvx512:
      return avx2 && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512dq");
  }
  return false;
}

Isa ChooseIsa() {
  const char* const wanted = std::getenv("TESSERA_ISA");
  for (Isa isa : {Isa::kAvx512, Isa::kAvx2, Isa::kPortable}) {
    if (wanted != nullptr && std::strcmp(wanted, IsaName(isa)) == 0) {
      if (Has(isa)) return isa;
    }
  }
  const Isa best = Has(Isa::kAvx512) ? Isa::kAvx512
                   : Has(Isa::kAvx2) ? Isa::kAvx2
                                     : Isa::kPortable;
  if (wanted != nullptr) {
    std::fprintf(stderr,
                 "TESSERA_ISA=%s: expected avx512, avx2 or portable, and a "
                 "processor that has it; taking %s\n",
                 wanted, IsaName(best));
  }
  return best;
}

}  // namespace

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

const char* ReduceOpName(ReduceOp op) {
  static constexpr const char* kNames[kNumReduceOps] = {"sum", "average", "min",
                                                        "max", "product"};
  return kNames[static_cast<int>(op)];
}

const char* IsaName(Isa isa) {
  static constexpr const char* kNames[] = {"portable", "avx2", "avx512"};
  return kNames[static_cast<int>(isa)];
}

Isa BestIsa() {
  static const Isa isa = ChooseIsa();
  return isa;
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

void SumPartInOrder(ElementType type, const float* before,
                    const void* const* sources, int num_sources, bool last,
                    void* out, int64_t numel, Isa isa) {
  TESSERA_CHECK_GE(num_sources, 1);
  TESSERA_CHECK(type == ElementType::kFloat16 ||
                type == ElementType::kBFloat16);
  switch (isa) {
    case Isa::kPortable:
      return portable::SumPart(type, before, sources, num_sources, last, out,
                               numel);
    case Isa::kAvx2:
      return avx2::SumPart(type, before, sources, num_sources, last, out,
                           numel);
    case Isa::kAvx512:
      return avx512::SumPart(type, before, sources, num_sources, last, out,
                             numel);
  }
}

}  // namespace tessera::shm
