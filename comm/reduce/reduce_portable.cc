#define TESSERA_REDUCE_ISA portable
#include "comm/reduce/reduce_kernels.h"
