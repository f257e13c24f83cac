#define TESSERA_REDUCE_ISA avx2
#include "comm/reduce/reduce_kernels.h"
