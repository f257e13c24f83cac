#include "base/isa.h"

#include <cpuid.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace tessera {
namespace {

bool Has(Isa isa) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  __get_cpuid(1, &a, &b, &c, &d);
  const bool avx2 = __builtin_cpu_supports("avx2") &&
                    __builtin_cpu_supports("fma") && (c & bit_F16C) != 0;
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

const char* IsaName(Isa isa) {
  static constexpr const char* kNames[] = {"portable", "avx2", "avx512"};
  return kNames[static_cast<int>(isa)];
}

Isa BestIsa() {
  static const Isa isa = ChooseIsa();
  return isa;
}

}  // namespace tessera
