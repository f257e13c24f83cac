#define TESSERA_SHM_ISA portable
#include "comm/shm/reduce_kernels.h"
