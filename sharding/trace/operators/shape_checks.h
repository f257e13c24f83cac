// Shape checks: what libtorch's kernels refuse, in their words, of the
// operators whose results a rule tells (shape_rules.h): a rule makes something
// of any arguments, and a plan of a wrong model would be a wrong plan. Throw
// c10::Error.
#ifndef SHARDING_TRACE_OPERATORS_SHAPE_CHECKS_H_
#define SHARDING_TRACE_OPERATORS_SHAPE_CHECKS_H_

#include "sharding/trace/operators/shape_rules.h"

namespace tessera {

// Arguments as those of the aten operator.
void CheckConvolution(const OperatorArguments& args);
void CheckLayerNorm(const OperatorArguments& args);
void CheckGroupNorm(const OperatorArguments& args);
void CheckBatchNorm(const OperatorArguments& args);

}  // namespace tessera
#endif  // SHARDING_TRACE_OPERATORS_SHAPE_CHECKS_H_
