#define TESSERA_SHM_ISA portable
#include "comm/reduce/reduce_kernels.h"
