#include "sharding/dispatch/cast_inputs.h"

#include <vector>

#include "absl/container/flat_hash_set.h"
#include "base/torch/storage_access.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/flat/registry.h"

namespace tessera {
namespace {

using Names = absl::flat_hash_set<std::string>;

bool IsFloating(const at::Tensor& t) {
  return t.defined() && at::isFloatingType(t.scalar_type());
}

bool IsStatistics(const c10::Argument& argument) {
  return argument.name() == "running_mean" || argument.name() == "running_var";
}

bool IsWritten(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// Calls f(tensor, argument) for each floating tensor among the arguments.
template <typename F>
void ForEachFloating(const c10::FunctionSchema& schema,
                     const torch::jit::Stack& stack, F&& f) {
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = torch::jit::peek(stack, i, arguments.size());
    if (value.isTensor()) {
      if (IsFloating(value.toTensor())) f(value.toTensor(), arguments[i]);
    } else if (value.isTensorList()) {
      for (const at::Tensor& t : value.toTensorVector()) {
        if (IsFloating(t)) f(t, arguments[i]);
      }
    }
  }
}

struct Dtypes {
  std::optional<at::ScalarType> input;  // of a normalisation
  std::optional<at::ScalarType> parameters, statistics;
  bool parameters_differ = false;
};

Dtypes Look(const c10::FunctionSchema& schema, InputCasts casts,
            const torch::jit::Stack& stack, OwnsTensor owned) {
  Dtypes dtypes;
  const c10::Argument* input =
      casts == InputCasts::kNormalization ? &schema.arguments()[0] : nullptr;
  ForEachFloating(schema, stack,
                  [&](const at::Tensor& t, const c10::Argument& argument) {
                    const at::ScalarType dtype = t.scalar_type();
                    if (&argument == input) {
                      dtypes.input = dtype;
                    } else if (IsStatistics(argument)) {
                      dtypes.statistics = dtype;
                    } else if (owned(t)) {
                      dtypes.parameters_differ |=
                          dtypes.parameters.value_or(dtype) != dtype;
                      dtypes.parameters = dtype;
                    }
                  });
  return dtypes;
}

// Casts every floating argument that may be replaced; those that flats own only
// if `owned_too`.
void CastArguments(const c10::FunctionSchema& schema, at::ScalarType to,
                   bool owned_too, OwnsTensor owned, torch::jit::Stack* stack) {
  auto cast = [&](const at::Tensor& t) {
    const bool is_cast =
        IsFloating(t) && t.scalar_type() != to && (owned_too || !owned(t));
    return is_cast ? t.to(to) : t;
  };
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (IsStatistics(arguments[i]) || IsWritten(arguments[i])) continue;
    c10::IValue& value = torch::jit::peek(*stack, i, arguments.size());
    if (value.isTensor()) {
      value = cast(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list = value.toTensorVector();
      for (at::Tensor& t : list) t = cast(t);
      value = std::move(list);
    }
  }
}

}  // namespace

bool FlatCastsInputsOf(const at::Tensor& tensor) {
  if (!HasTag(tensor)) return false;
  const StorageOwner owned = Registry::Global().Find(tensor);
  return owned && owned.flat->cast_inputs();
}

InputCasts InputCastsOf(const std::string& name) {
  static const auto* inputs = new Names{"aten::linear",
                                        "aten::matmul",
                                        "aten::linalg_matmul",
                                        "aten::mm",
                                        "aten::bmm",
                                        "aten::mv",
                                        "aten::addmm",
                                        "aten::addmv",
                                        "aten::addbmm",
                                        "aten::baddbmm",
                                        "aten::dot",
                                        "aten::vdot",
                                        "aten::linalg_vecdot",
                                        "aten::inner",
                                        "aten::tensordot",
                                        "aten::einsum",
                                        "aten::chain_matmul",
                                        "aten::linalg_multi_dot",
                                        "aten::bilinear",
                                        "aten::lerp",
                                        "aten::conv1d",
                                        "aten::conv2d",
                                        "aten::conv3d",
                                        "aten::conv_tbc",
                                        "aten::conv_transpose1d",
                                        "aten::conv_transpose2d",
                                        "aten::conv_transpose3d",
                                        "aten::convolution",
                                        "aten::_convolution",
                                        "aten::lstm",
                                        "aten::gru",
                                        "aten::rnn_tanh",
                                        "aten::rnn_relu",
                                        "aten::lstm_cell",
                                        "aten::gru_cell",
                                        "aten::rnn_tanh_cell",
                                        "aten::rnn_relu_cell",
                                        "aten::prelu",
                                        "aten::embedding_bag",
                                        "aten::scaled_dot_product_attention"};
  static const auto* normalizations =
      new Names{"aten::layer_norm",   "aten::native_layer_norm",
                "aten::rms_norm",     "aten::_fused_rms_norm",
                "aten::group_norm",   "aten::native_group_norm",
                "aten::batch_norm",   "aten::native_batch_norm",
                "aten::instance_norm"};
  if (inputs->contains(name)) return InputCasts::kInputs;
  if (normalizations->contains(name)) return InputCasts::kNormalization;
  return InputCasts::kNone;
}

std::optional<at::ScalarType> CastInputs(const c10::OperatorHandle& op,
                                         InputCasts casts,
                                         torch::jit::Stack* stack,
                                         OwnsTensor owned) {
  const c10::FunctionSchema& schema = op.schema();
  const Dtypes dtypes = Look(schema, casts, *stack, owned);
  if (!dtypes.parameters || dtypes.parameters_differ) return std::nullopt;
  const at::ScalarType parameters = *dtypes.parameters;
  if (casts == InputCasts::kInputs) {
    CastArguments(schema, parameters, /*owned_too=*/false, owned, stack);
    return std::nullopt;
  }
  const at::ScalarType computed = dtypes.statistics.value_or(parameters);
  CastArguments(schema, computed, /*owned_too=*/true, owned, stack);
  const at::ScalarType input = dtypes.input.value_or(parameters);
  const at::ScalarType result =
      c10::elementSize(input) < c10::elementSize(parameters) ? input
                                                             : parameters;
  if (result == computed) return std::nullopt;
  return result;
}

void CastFirstResult(size_t num_returns, at::ScalarType dtype,
                     torch::jit::Stack* stack) {
  c10::IValue& first = torch::jit::peek(*stack, 0, num_returns);
  first = first.toTensor().to(dtype);
}

}  // namespace tessera
