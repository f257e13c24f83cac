#define TESSERA_ADAMW_ISA adamw_portable
#include "optim/adamw_kernel_loops.h"
