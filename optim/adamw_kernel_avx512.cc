#define TESSERA_ADAMW_ISA adamw_avx512
#include "optim/adamw_kernel_loops.h"
