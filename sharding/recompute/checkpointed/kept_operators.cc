#include "sharding/recompute/checkpointed/kept_operators.h"

#include <algorithm>

#include "base/torch/torch_scope.h"
#include "sharding/dispatch/stack_tensors.h"
#include "sharding/recompute/matmul_operators.h"

namespace tessera {
namespace {

bool Same(const at::Tensor& a, const at::Tensor& b) {
  if (a.is_same(b)) return true;
  return StorageOf(a) != nullptr && StorageOf(a) == StorageOf(b) &&
         a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() &&
         a.strides() == b.strides() && a.dtype() == b.dtype();
}

at::Tensor CloneOf(const at::Tensor& tensor) {
  TorchScope scope;
  return tensor.clone();
}

std::optional<size_t> Find(const std::vector<at::Tensor>& tensors,
                           const at::Tensor& tensor) {
  auto it = std::find_if(tensors.begin(), tensors.end(),
                         [&](const auto& t) { return Same(t, tensor); });
  if (it == tensors.end()) return std::nullopt;
  return static_cast<size_t>(it - tensors.begin());
}

}  // namespace

bool IsKept(const CheckpointOptions& options, const OperatorInfo& info) {
  const bool matmuls =
      options.policy == CheckpointOptions::Policy::kKeepMatmuls;
  if (!matmuls && options.keep == nullptr) return false;
  // A cast may come from autocast's cache in forward, and not again. What
  // writes its arguments has to.
  const bool writes = std::find(info.writes.begin(), info.writes.end(), true) !=
                          info.writes.end() ||
                      !info.statistics.empty();
  if (info.copies || writes) return false;
  return (matmuls && IsMatmulOrAttention(info.name)) ||
         (options.keep != nullptr && options.keep(info.name));
}

bool KeptOperator::is_there() const {
  return usable &&
         std::all_of(results.begin(), results.end(), [](const Result& r) {
           return !r.value || r.value->IsUnchanged();
         });
}

void KeptOperatorsBuilder::Begin(const OperatorInfo& info,
                                 const torch::jit::Stack& arguments) {
  // Even if it throws, and the function goes on: it counts.
  all_->emplace_back().name = info.name;
  running_.emplace();
  running_->op.name = info.name;
  ForEachDefinedTensor(
      arguments, info.writes.size(),
      [&](const at::Tensor& t, size_t) { running_->arguments.push_back(t); });
}

void KeptOperatorsBuilder::Save(const at::Tensor& tensor) {
  if (running_) running_->saved.push_back(tensor);
}

void KeptOperatorsBuilder::FindSaved(const std::vector<at::Tensor>& results) {
  for (const at::Tensor& saved : running_->saved) {
    const auto argument = Find(running_->arguments, saved);
    const auto result = argument ? argument : Find(results, saved);
    if (!result) {
      running_->op.usable = false;
      return;
    }
    running_->op.saved.push_back({!argument.has_value(), *result});
  }
}

void KeptOperatorsBuilder::End(const c10::OperatorHandle& op,
                               const torch::jit::Stack& stack,
                               const std::vector<at::Device>& devices) {
  if (!running_) return;
  const size_t n = op.schema().returns().size();
  std::vector<at::Tensor> results;
  KeptOperator& kept = running_->op;
  kept.usable = true;
  for (size_t i = stack.size() - n; i < stack.size(); ++i) {
    kept.usable &= !stack[i].isTensorList() && !stack[i].isCustomClass();
    if (!stack[i].isTensor() || !stack[i].toTensor().defined()) continue;
    results.push_back(stack[i].toTensor());
    // One that is a view of something else would be kept without that.
    kept.usable &= !Find(running_->arguments, results.back());
  }
  FindSaved(results);
  if (kept.usable) {
    for (size_t i = stack.size() - n; i < stack.size(); ++i) {
      auto& result = kept.results.emplace_back();
      if (!stack[i].isTensor() || !stack[i].toTensor().defined()) {
        result.other = stack[i];
        continue;
      }
      const at::Tensor& tensor = stack[i].toTensor();
      result.role.emplace(tensor);
      result.value.emplace(tensor, outer_);
      places_[StorageOf(tensor)].push_back(
          {all_->size() - 1, kept.results.size() - 1, AliasOf(tensor)});
    }
    if (OperatorInfo::Of(op).may_draw) {
      kept.drawn_to = GeneratorStates::OfDefaults(devices);
    }
  }
  all_->back() = std::move(kept);
  running_.reset();
}

void KeptOperatorsBuilder::BeforeWrite(const c10::StorageImpl* storage) {
  auto it = places_.find(storage);
  if (it == places_.end()) return;
  for (const Place& place : it->second) {
    (*all_)[place.op].results[place.result].value.emplace(CloneOf(place.tensor),
                                                          outer_);
  }
  places_.erase(it);
}

}  // namespace tessera
