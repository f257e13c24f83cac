// TracedOperator: how a tracer runs an operator, from its schema and kernels.
// It is looked up once per operator and tracer.
#ifndef SHARDING_TRACE_TRACED_OPERATOR_H_
#define SHARDING_TRACE_TRACED_OPERATOR_H_

#include <cstddef>
#include <string>

#include "ATen/core/dispatch/Dispatcher.h"
#include "sharding/dispatch/operator_info.h"
#include "sharding/trace/operators/shape_rules.h"

namespace tessera {

struct TracedOperator {
  enum class Kind {
    kView,       // changes sizes and aliases alone
    kComposite,  // is made of others
    kValues,  // needs values: its results are values, or as many as these say
    kSizes,   // by `rule`, or by the kernel of meta
    kZeros,   // computed on zeros
    kEqual,   // aten::equal
  };
  Kind kind = Kind::kZeros;
  const OperatorInfo* info = nullptr;
  ShapeRule rule = nullptr;
  ShapeRule if_large = nullptr;  // of kZeros: where its arguments are too large
  int device = -1;               // which argument it is
  size_t arguments = 0;
  size_t returns = 0;

  const std::string& name() const { return info->name; }
  // Whether it reads or writes values of its arguments.
  bool uses_values() const {
    return info->kind == OperatorInfo::Kind::kCompute && kind != Kind::kView &&
           kind != Kind::kComposite;
  }

  static TracedOperator Of(const c10::OperatorHandle& op);
};

}  // namespace tessera
#endif  // SHARDING_TRACE_TRACED_OPERATOR_H_
