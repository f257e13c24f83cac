// The instruction sets that loops are compiled for: AVX-512, AVX2 (with FMA and
// F16C) and plain x86-64. All give the same bits.
#ifndef BASE_ISA_H_
#define BASE_ISA_H_

#include <cstdint>

namespace tessera {

enum class Isa : int32_t { kPortable, kAvx2, kAvx512 };

// What this processor has, or what TESSERA_ISA=avx512|avx2|portable in the
// environment says if it has that. Chosen when first called.
Isa BestIsa();
const char* IsaName(Isa isa);

}  // namespace tessera
#endif  // BASE_ISA_H_
