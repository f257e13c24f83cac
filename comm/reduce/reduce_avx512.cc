#define TESSERA_REDUCE_ISA avx512
#include "comm/reduce/reduce_kernels.h"
