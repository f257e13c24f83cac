#include "verify/plain/plain_casts.h"

#include <torch/library.h>
#include <torch/torch.h>

#include <optional>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_split.h"
#include "base/above/above_autograd.h"
#include "c10/core/DispatchKeySet.h"
#include "c10/core/impl/LocalDispatchKeySet.h"

namespace tessera {
namespace {

// Nobody else uses this key, which is above autograd and autocast.
constexpr c10::DispatchKey kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

std::set<const c10::StorageImpl*>& Storages() {
  static auto* const storages = new std::set<const c10::StorageImpl*>;
  return *storages;
}

bool IsFloating(const at::Tensor& t) {
  return t.defined() && t.is_floating_point();
}

bool IsParameter(const at::Tensor& t) {
  return t.has_storage() &&
         Storages().count(t.storage().unsafeGetStorageImpl()) > 0;
}

const std::set<std::string>& Layers() {
  static const auto* const names = new std::set<std::string>(absl::StrSplit(
      "linear,matmul,linalg_matmul,mm,bmm,mv,addmm,addmv,addbmm,baddbmm,dot,"
      "vdot,linalg_vecdot,inner,tensordot,einsum,chain_matmul,"
      "linalg_multi_dot,bilinear,lerp,conv1d,conv2d,conv3d,conv_tbc,"
      "conv_transpose1d,conv_transpose2d,conv_transpose3d,convolution,"
      "_convolution,lstm,gru,rnn_tanh,rnn_relu,lstm_cell,gru_cell,"
      "rnn_tanh_cell,rnn_relu_cell,prelu,embedding_bag,"
      "scaled_dot_product_attention",
      ','));
  return *names;
}

const std::set<std::string>& Norms() {
  static const auto* const names = new std::set<std::string>(absl::StrSplit(
      "layer_norm,native_layer_norm,rms_norm,_fused_rms_norm,group_norm,"
      "native_group_norm,batch_norm,native_batch_norm,instance_norm",
      ','));
  return *names;
}

// The arguments of an operator, which are on top of the stack.
class Arguments {
 public:
  Arguments(const c10::FunctionSchema& schema, torch::jit::Stack* stack)
      : schema_(schema), stack_(stack) {}

  c10::IValue& value(size_t i) {
    return torch::jit::peek(*stack_, i, schema_.arguments().size());
  }
  bool is_statistic(size_t i) const {
    const std::string& name = schema_.arguments()[i].name();
    return name == "running_mean" || name == "running_var";
  }
  bool is_written(size_t i) const {
    const auto* const alias = schema_.arguments()[i].alias_info();
    return alias != nullptr && alias->isWrite();
  }
  // Calls f(tensor, argument) for each tensor, and replaces it by the result.
  template <typename F>
  void Map(F f) {
    for (size_t i = 0; i < schema_.arguments().size(); ++i) {
      c10::IValue& argument = value(i);
      if (argument.isTensor()) {
        argument = f(argument.toTensor(), i);
      } else if (argument.isTensorList()) {
        std::vector<at::Tensor> list = argument.toTensorVector();
        for (at::Tensor& t : list) t = f(t, i);
        argument = std::move(list);
      }
    }
  }

 private:
  const c10::FunctionSchema& schema_;
  torch::jit::Stack* const stack_;
};

// Returns the dtype to which the first result must be cast, if it must be.
std::optional<at::ScalarType> CastArguments(Arguments arguments, bool norm) {
  std::set<at::ScalarType> parameters;
  std::optional<at::ScalarType> statistics;
  arguments.Map([&](const at::Tensor& t, size_t i) {
    if (!IsFloating(t) || (norm && i == 0)) return t;
    if (arguments.is_statistic(i)) {
      statistics = t.scalar_type();
    } else if (IsParameter(t)) {
      parameters.insert(t.scalar_type());
    }
    return t;
  });
  if (parameters.size() != 1) return std::nullopt;
  const at::ScalarType dtype = *parameters.begin();
  const at::ScalarType to = norm ? statistics.value_or(dtype) : dtype;
  at::ScalarType result = dtype;
  if (norm && IsFloating(arguments.value(0).toTensor())) {
    const at::ScalarType input = arguments.value(0).toTensor().scalar_type();
    if (c10::elementSize(input) < c10::elementSize(dtype)) result = input;
  }
  arguments.Map([&](const at::Tensor& t, size_t i) {
    const bool stays = !IsFloating(t) || arguments.is_statistic(i) ||
                       arguments.is_written(i) || (!norm && IsParameter(t));
    return stays ? t : t.to(to);
  });
  if (!norm || result == to) return std::nullopt;
  return result;
}

bool AutocastTakes(c10::DispatchKeySet keys) {
  return keys.has_any(c10::autocast_dispatch_keyset);
}

bool AutocastIsOn() {
  const auto off = c10::impl::tls_local_dispatch_key_set().excluded_;
  return !off.has_all(c10::autocast_dispatch_keyset);
}

void Fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
              torch::jit::Stack* stack) {
  const std::string& full = op.schema().name();
  const bool aten = full.rfind("aten::", 0) == 0;
  const std::string name = aten ? full.substr(6) : "";
  const bool norm = Norms().count(name) > 0;
  std::optional<at::ScalarType> result;
  if ((norm || Layers().count(name) > 0) && !AutocastTakes(keys)) {
    result = CastArguments(Arguments(op.schema(), stack), norm);
  }
  const auto below =
      keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
  {
    // What an operator of libtorch calls is left alone; but autocast casts
    // inside of composite operators, and an operator of placed tensors, which
    // have kAboveKey, calls others of their parts.
    std::optional<c10::impl::ExcludeDispatchKeyGuard> guard;
    if (aten && !AutocastIsOn() && !keys.has(kAboveKey)) {
      guard.emplace(c10::DispatchKeySet(kKey));
    }
    op.redispatchBoxed(below, stack);
  }
  if (!result) return;
  c10::IValue& first =
      torch::jit::peek(*stack, 0, op.schema().returns().size());
  first = first.toTensor().to(*result);
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&Fallback>());
}

}  // namespace

PlainCasts::PlainCasts(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& p : parameters) {
    Storages().insert(p.storage().unsafeGetStorageImpl());
  }
  c10::impl::tls_set_dispatch_key_included(kKey, true);
}

PlainCasts::~PlainCasts() {
  c10::impl::tls_set_dispatch_key_included(kKey, false);
  Storages().clear();
}

}  // namespace tessera
