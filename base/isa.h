// Isa names the instruction sets that loops are compiled for: AVX-512, AVX2
// (with FMA and F16C) and plain x86-64. All give the same bits.
#ifndef BASE_ISA_H_
#define BASE_ISA_H_

#include <cstdint>

namespace tessera {

enum class Isa : int32_t { kPortable, kAvx2, kAvx512 };

// Returns the best set that this processor has, or the one that the
// environment's TESSERA_ISA=avx512|avx2|portable names if the processor has it.
// The first call decides.
Isa BestIsa();
const char* IsaName(Isa isa);

}  // namespace tessera
#endif  // BASE_ISA_H_
