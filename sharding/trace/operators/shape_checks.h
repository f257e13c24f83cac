// Shape checks: refuse arguments that libtorch's kernels refuse, with their
// messages, for operators whose results a rule computes (shape_rules.h): a rule
// accepts any arguments, and a plan of a wrong model would be wrong. They throw
// c10::Error.
#ifndef SHARDING_TRACE_OPERATORS_SHAPE_CHECKS_H_
#define SHARDING_TRACE_OPERATORS_SHAPE_CHECKS_H_

#include "sharding/trace/operators/shape_rules.h"

namespace tessera {

// `args` are the aten operator's arguments.
void CheckConvolution(const OperatorArguments& args);
void CheckLayerNorm(const OperatorArguments& args);
void CheckGroupNorm(const OperatorArguments& args);
void CheckBatchNorm(const OperatorArguments& args);

}  // namespace tessera
#endif  // SHARDING_TRACE_OPERATORS_SHAPE_CHECKS_H_
