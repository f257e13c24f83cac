#define TESSERA_SHM_ISA avx512
#include "comm/shm/reduce_kernels.h"
