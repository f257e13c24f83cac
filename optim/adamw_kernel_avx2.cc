#define TESSERA_ADAMW_ISA adamw_avx2
#include "optim/adamw_kernel_loops.h"
