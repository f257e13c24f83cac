#include "sharding/dispatch/batch_norms.h"

#include <atomic>
#include <utility>

#include "absl/base/const_init.h"
#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"

namespace tessera {
namespace {

// The number of arguments of aten::batch_norm(input, weight, bias,
// running_mean, running_var, training, momentum, eps, cudnn_enabled).
constexpr size_t kArguments = 9;

struct Entry {
  // So that its address is not another tensor's.
  c10::weak_intrusive_ptr<c10::TensorImpl> weight;
  BatchNormReplacement replacement;
};

ABSL_CONST_INIT absl::Mutex g_mutex(absl::kConstInit);
absl::flat_hash_map<const c10::TensorImpl*, Entry>& Entries()
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(g_mutex) {
  static auto* entries =
      new absl::flat_hash_map<const c10::TensorImpl*, Entry>();
  return *entries;
}
std::atomic<bool> g_any{false};

BatchNormReplacement Find(const at::Tensor& weight) {
  absl::MutexLock lock(&g_mutex);
  const auto it = Entries().find(weight.unsafeGetTensorImpl());
  return it == Entries().end() ? nullptr : it->second.replacement;
}

at::Tensor OrUndefined(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

}  // namespace

void ReplaceBatchNorm(const at::Tensor& weight,
                      BatchNormReplacement replacement) {
  absl::MutexLock lock(&g_mutex);
  auto& entries = Entries();
  for (auto it = entries.begin(); it != entries.end();) {
    const auto here = it++;
    if (here->second.weight.expired()) entries.erase(here);
  }
  entries.erase(weight.unsafeGetTensorImpl());
  if (replacement == nullptr) return;
  entries.emplace(
      weight.unsafeGetTensorImpl(),
      Entry{c10::weak_intrusive_ptr<c10::TensorImpl>(weight.getIntrusivePtr()),
            std::move(replacement)});
  g_any = true;
}

bool RunBatchNormReplacement(torch::jit::Stack* stack) {
  if (!g_any) return false;
  const auto argument = [&](size_t i) -> const c10::IValue& {
    return torch::jit::peek(*stack, i, kArguments);
  };
  BatchNormCall call;
  call.weight = OrUndefined(argument(1));
  if (!call.weight.defined() || !argument(5).toBool()) return false;
  const BatchNormReplacement replacement = Find(call.weight);
  if (replacement == nullptr) return false;
  call.input = argument(0).toTensor();
  call.bias = OrUndefined(argument(2));
  call.running_mean = OrUndefined(argument(3));
  call.running_var = OrUndefined(argument(4));
  call.momentum = argument(6).toDouble();
  call.eps = argument(7).toDouble();
  torch::jit::drop(*stack, kArguments);
  torch::jit::push(*stack, replacement(call));
  return true;
}

}  // namespace tessera
