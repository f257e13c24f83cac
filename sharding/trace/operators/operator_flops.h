// The work of an operator, which determines its time.
//
//   flops   multiplications and additions of products of matrices,
//           convolutions, attention: a multiplication and an addition count as
//           two. Others count as none.
//   moved   bytes of its arguments and results, each once; of tables that are
//           looked up in, what is found
#ifndef SHARDING_TRACE_OPERATORS_OPERATOR_FLOPS_H_
#define SHARDING_TRACE_OPERATORS_OPERATOR_FLOPS_H_

#include <cstdint>
#include <string>

#include "sharding/trace/operators/shape_rules.h"

namespace tessera {

// `name` is "aten::mm", without an overload's name; only sizes of tensors are
// looked at. Operators that it calls itself count with it.
bool HasOperatorFlops(const std::string& name);
int64_t OperatorFlops(const std::string& name, const OperatorArguments& args,
                      const OperatorResults& results);

int64_t OperatorMovedBytes(const std::string& name,
                           const OperatorArguments& args,
                           const OperatorResults& results);

}  // namespace tessera
#endif  // SHARDING_TRACE_OPERATORS_OPERATOR_FLOPS_H_
