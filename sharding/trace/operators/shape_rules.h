// Shape rules: compute sizes, strides and dtypes of the results of operators
// for which libtorch has no kernel of the meta device in C++, as the CPU kernel
// would. shape_rules_test.cc checks them against the kernels.
//
// A rule is given the operator's arguments on meta and makes its results there;
// a result may be an argument. Nothing follows the operators that it calls.
#ifndef SHARDING_TRACE_OPERATORS_SHAPE_RULES_H_
#define SHARDING_TRACE_OPERATORS_SHAPE_RULES_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/core/stack.h"
#include "absl/container/flat_hash_map.h"

namespace tessera {

// OperatorArguments: an operator's arguments, by position.
class OperatorArguments {
 public:
  explicit OperatorArguments(const torch::jit::Stack& values)
      : values_(values) {}
  // Undefined where there is none.
  at::Tensor tensor(size_t i) const {
    return values_[i].isTensor() ? values_[i].toTensor() : at::Tensor();
  }
  bool has(size_t i) const { return !values_[i].isNone(); }
  int64_t integer(size_t i) const { return values_[i].toInt(); }
  bool boolean(size_t i) const { return values_[i].toBool(); }
  std::vector<int64_t> integers(size_t i) const {
    return values_[i].toIntVector();
  }
  const c10::IValue& operator[](size_t i) const { return values_[i]; }
  size_t count() const { return values_.size(); }

 private:
  const torch::jit::Stack& values_;
};

using OperatorResults = std::vector<c10::IValue>;
using ShapeRule = OperatorResults (*)(const OperatorArguments& args);

// Returns the rule of "aten::where.self" or "aten::relu"; null: there is none.
// "NAME if large" has an estimate, for operators that are better computed on
// zeros.
ShapeRule FindShapeRule(const std::string& name);

// Parts of the table.
using ShapeRules = std::vector<std::pair<const char*, ShapeRule>>;
ShapeRules LayerShapeRules();

// Returns the sizes of a convolution's result, channels included. `args` are
// those of aten::convolution.
std::vector<int64_t> ConvolutionSizes(const OperatorArguments& args);

}  // namespace tessera
#endif  // SHARDING_TRACE_OPERATORS_SHAPE_RULES_H_
