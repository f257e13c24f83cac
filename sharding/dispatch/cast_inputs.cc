#include "sharding/dispatch/cast_inputs.h"

#include <vector>

#include "base/torch/aten_names.h"
#include "base/torch/storage_access.h"
#include "sharding/dispatch/stack_tensors.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/flat/registry.h"

namespace tessera {
namespace {

bool IsFloating(const at::Tensor& t) {
  return t.defined() && at::isFloatingType(t.scalar_type());
}

bool IsStatistics(const c10::Argument& argument) {
  return argument.name() == "running_mean" || argument.name() == "running_var";
}

bool IsWritten(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
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
  ForEachTensorOf(stack, schema.arguments().size(),
                  [&](const at::Tensor& t, size_t i) {
                    if (!IsFloating(t)) return;
                    const c10::Argument& argument = schema.arguments()[i];
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
  static const auto* const inputs = new AtenNames(
      "linear,matmul,linalg_matmul,mm,bmm,mv,addmm,addmv,addbmm,baddbmm,dot,"
      "vdot,linalg_vecdot,inner,tensordot,einsum,chain_matmul,"
      "linalg_multi_dot,bilinear,lerp,conv1d,conv2d,conv3d,conv_tbc,"
      "conv_transpose1d,conv_transpose2d,conv_transpose3d,convolution,"
      "_convolution,lstm,gru,rnn_tanh,rnn_relu,lstm_cell,gru_cell,"
      "rnn_tanh_cell,rnn_relu_cell,prelu,embedding_bag,"
      "scaled_dot_product_attention");
  static const auto* const normalizations = new AtenNames(
      "layer_norm,native_layer_norm,rms_norm,_fused_rms_norm,group_norm,"
      "native_group_norm,batch_norm,native_batch_norm,instance_norm");
  if (inputs->Contains(name)) return InputCasts::kInputs;
  if (normalizations->Contains(name)) return InputCasts::kNormalization;
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
