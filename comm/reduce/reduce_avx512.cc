#define TESSERA_SHM_ISA avx512
#include "comm/reduce/reduce_kernels.h"
