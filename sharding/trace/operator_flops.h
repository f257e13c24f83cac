// Operator flops: multiplications and additions of the operators that take the
// time of a network: products of matrices, convolutions, attention. A
// multiplication and an addition count as two. Others count as none.
#ifndef SHARDING_TRACE_OPERATOR_FLOPS_H_
#define SHARDING_TRACE_OPERATOR_FLOPS_H_

#include <cstdint>
#include <string>

#include "sharding/trace/shape_rules.h"

namespace tessera {

// `args` and `results` on meta.
int64_t OperatorFlops(const std::string& name, const OperatorArguments& args,
                      const OperatorResults& results);

}  // namespace tessera
#endif  // SHARDING_TRACE_OPERATOR_FLOPS_H_
