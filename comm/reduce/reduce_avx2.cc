#define TESSERA_SHM_ISA avx2
#include "comm/reduce/reduce_kernels.h"
