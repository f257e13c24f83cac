// Kernel memory: what CPU kernels of libtorch take from its allocator while
// they run, and free before they return: buffers of each thread, copies in
// another layout. Where it is small, as for most operators, it counts as none.
#ifndef SHARDING_TRACE_OPERATORS_KERNEL_MEMORY_H_
#define SHARDING_TRACE_OPERATORS_KERNEL_MEMORY_H_

#include <cstdint>
#include <string>

#include "sharding/trace/operators/shape_rules.h"

namespace tessera {

// Bytes; `args` and `results` on meta. By at::get_num_threads().
int64_t KernelMemory(const std::string& name, const OperatorArguments& args,
                     const OperatorResults& results);

}  // namespace tessera
#endif  // SHARDING_TRACE_OPERATORS_KERNEL_MEMORY_H_
