// What operators of other stages return: tensors of the sizes that kernels
// would give, without memory.
#include <utility>

#include "ATen/core/LegacyTypeDispatch.h"
#include "absl/strings/str_cat.h"
#include "base/torch_guard.h"
#include "c10/core/TensorImpl.h"
#include "parallel/pipeline/staged_run.h"
#include "sharding/dispatch/operator_info.h"
#include "sharding/dispatch/stack_tensors.h"
#include "sharding/trace/operators/shape_rules.h"

namespace tessera {
namespace {

// What is computed on behalf of a run is not seen by it.
class Unseen {
  at::AutoDispatchBelowADInplaceOrView below_;
  c10::impl::ExcludeDispatchKeyGuard exclude_{c10::DispatchKeySet(kBelowKey)};
};

}  // namespace

// What draws random numbers is computed, of zeros, so that it draws as many.
void StagedRun::RunElsewhere(const c10::OperatorHandle& op,
                             const TracedOperator& info,
                             c10::DispatchKeySet keys,
                             torch::jit::Stack* stack) {
  MetaCall call(*stack, info.arguments, info.device);
  std::vector<c10::IValue> results;
  {
    Unseen unseen;
    if (info.info->may_draw || info.kind != TracedOperator::Kind::kSizes) {
      results = call.OnZeros();
      op.redispatchBoxed(BelowBelow(keys), &results);
    } else if (info.rule != nullptr) {
      results = info.rule(OperatorArguments(call.arguments()));
    } else {
      results = call.arguments();
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &results);
    }
  }
  ForEachDefinedTensor(
      results, results.size(), [&](const at::Tensor& t, size_t) {
        if (t.has_storage()) return;
        ThrowIfError(absl::UnimplementedError(absl::StrCat(
            info.name(),
            " gives a tensor that is not dense, which a stage of a "
            "pipeline cannot do without computing it")));
      });
  Return(info, call, results, stack);
}

void StagedRun::Return(const TracedOperator& info, const MetaCall& call,
                       const std::vector<c10::IValue>& results,
                       torch::jit::Stack* stack) {
  LoseValues(info, call, *stack);
  std::vector<c10::IValue> adopted;
  for (const c10::IValue& value : results) {
    adopted.push_back(WithTensors(
        value, [&](const at::Tensor& t) { return Adopt(call, t); }));
  }
  adopted_.clear();
  torch::jit::drop(*stack, info.arguments);
  for (c10::IValue& value : adopted) stack->push_back(std::move(value));
}

// What another stage writes has no values here any more. Memory from outside
// stays, and gets them back at the end of the batch.
void StagedRun::LoseValues(const TracedOperator& info, const MetaCall& call,
                           const torch::jit::Stack& stack) {
  ForEachDefinedTensor(
      stack, info.arguments, [&](const at::Tensor& t, size_t i) {
        if (!info.info->MayWrite(stack, i)) return;
        const StagedStorages::Entry* const entry = storages_.Find(StorageOf(t));
        const bool outside = entry == nullptr || entry->outside;
        const size_t had = t.storage().nbytes();
        for (const MetaCall::Twin& twin : call.twins()) {
          if (!twin.original.is_same(t)) continue;
          const size_t bytes = twin.meta.storage().nbytes();
          if (bytes > t.storage().nbytes()) StorageOf(t)->set_nbytes(bytes);
          if (t.sizes() != twin.meta.sizes() ||
              t.strides() != twin.meta.strides()) {
            t.unsafeGetTensorImpl()->set_sizes_and_strides(twin.meta.sizes(),
                                                           twin.meta.strides());
          }
        }
        if (!outside || t.storage().nbytes() > had) TakeMemory(StorageOf(t));
      });
}

// New storages are absent, one for all results that share one.
at::Tensor StagedRun::Adopt(const MetaCall& call, const at::Tensor& meta) {
  if (!meta.defined()) return meta;
  if (const MetaCall::Twin* twin = call.Find(meta)) return twin->original;
  if (const MetaCall::Twin* twin = call.FindStorage(meta)) {
    return OnCpu(meta, twin->original.storage());
  }
  const c10::StorageImpl* const key = StorageOf(meta);
  for (const auto& [of, made] : adopted_) {
    if (of == key) return OnCpu(meta, made);
  }
  adopted_.emplace_back(key, AbsentStorage(meta.storage().nbytes(), at::kCPU));
  return OnCpu(meta, adopted_.back().second);
}

}  // namespace tessera
