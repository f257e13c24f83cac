#define TESSERA_SHM_ISA avx2
#include "comm/shm/reduce_kernels.h"
