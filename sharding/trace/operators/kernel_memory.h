// Kernel memory: memory that libtorch's CPU kernels allocate while they run and
// free before they return: buffers of each thread, copies in another layout.
// Where it is small, as for most operators, it counts as 0.
#ifndef SHARDING_TRACE_OPERATORS_KERNEL_MEMORY_H_
#define SHARDING_TRACE_OPERATORS_KERNEL_MEMORY_H_

#include <cstdint>
#include <string>

#include "sharding/trace/operators/shape_rules.h"

namespace tessera {

// Returns the bytes, for at::get_num_threads() threads; `args` and `results`
// are on meta.
int64_t KernelMemory(const std::string& name, const OperatorArguments& args,
                     const OperatorResults& results);

}  // namespace tessera
#endif  // SHARDING_TRACE_OPERATORS_KERNEL_MEMORY_H_
