// What operators return that are not computed: by rules and kernels of meta, or
// computed on zeros.
#include <algorithm>
#include <optional>
#include <utility>

#include "ATen/core/LegacyTypeDispatch.h"
#include "absl/strings/str_cat.h"
#include "c10/core/TensorImpl.h"
#include "sharding/dispatch/stack_tensors.h"
#include "sharding/trace/operators/kernel_memory.h"
#include "sharding/trace/operators/operator_flops.h"
#include "sharding/trace/traced_memory.h"
#include "sharding/trace/tracer.h"

namespace tessera {
namespace {

// What is computed on behalf of the tracer is not seen by it.
class Unseen {
  at::AutoDispatchBelowADInplaceOrView below_;
  c10::impl::ExcludeDispatchKeyGuard exclude_{c10::DispatchKeySet(kBelowKey)};
};

}  // namespace

int64_t Tracer::NewBytes(const MetaCall& call,
                         const std::vector<c10::IValue>& results) const {
  int64_t bytes = 0;
  ForEachDefinedTensor(results, results.size(),
                       [&](const at::Tensor& t, size_t) {
                         if (call.FindStorage(t) != nullptr) return;
                         bytes += static_cast<int64_t>(t.storage().nbytes());
                       });
  for (const MetaCall::Twin& twin : call.twins()) {
    bytes = std::max(bytes, static_cast<int64_t>(twin.meta.storage().nbytes()));
  }
  return bytes;
}

void Tracer::RunWithoutValues(const c10::OperatorHandle& op,
                              const TracedOperator& info,
                              c10::DispatchKeySet keys,
                              torch::jit::Stack* stack) {
  const MetaCall call(*stack, info.arguments, info.device);
  std::vector<c10::IValue> results;
  {
    Unseen unseen;
    if (info.rule != nullptr) {
      results = info.rule(OperatorArguments(call.arguments()));
    } else {
      results = call.arguments();
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &results);
    }
  }
  ForEachDefinedTensor(results, results.size(),
                       [&](const at::Tensor& t, size_t) {
                         if (!t.has_storage())
                           Fail(info, "gives a tensor that is not dense.");
                       });
  if (AllKnown(info, *stack) &&
      NewBytes(call, results) <= options_.known_bytes) {
    RunReally(op, info, keys, stack);
    return;
  }
  Return(info, call, results, stack);
}

void Tracer::Return(const TracedOperator& info, const MetaCall& call,
                    const std::vector<c10::IValue>& results,
                    torch::jit::Stack* stack) {
  SyncWritten(info, call, *stack);
  std::vector<c10::IValue> adopted;
  for (const c10::IValue& value : results) {
    adopted.push_back(WithTensors(
        value, [&](const at::Tensor& t) { return Adopt(call, t); }));
  }
  adopted_.clear();
  Record(info, call, results);
  torch::jit::drop(*stack, info.arguments);
  for (c10::IValue& value : adopted) stack->push_back(std::move(value));
}

// What is written is not known any more, and what was resized has other sizes.
void Tracer::SyncWritten(const TracedOperator& info, const MetaCall& call,
                         const torch::jit::Stack& stack) {
  ForEachDefinedTensor(stack, info.arguments,
                       [&](const at::Tensor& t, size_t i) {
                         if (!info.info->writes[i]) return;
                         Forget(t);
                         for (const MetaCall::Twin& twin : call.twins()) {
                           if (twin.original.is_same(t)) Resize(t, twin.meta);
                         }
                       });
}

void Tracer::Resize(const at::Tensor& t, const at::Tensor& like) {
  const auto bytes = static_cast<int64_t>(like.storage().nbytes());
  if (bytes > static_cast<int64_t>(t.storage().nbytes())) {
    TORCH_CHECK(TracedMemory::Of(StorageOf(t)) != nullptr,
                "an operator would resize a tensor that was there before the "
                "trace; plan a module of ConstructFake");
    TracedMemory::Regrow(StorageOf(t), bytes, log_);
  }
  if (t.sizes() == like.sizes() && t.strides() == like.strides()) return;
  t.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
}

// New storages are fake, one for all results that share one.
at::Tensor Tracer::Adopt(const MetaCall& call, const at::Tensor& meta) {
  if (!meta.defined()) return meta;
  if (const MetaCall::Twin* twin = call.Find(meta)) return twin->original;
  if (const MetaCall::Twin* twin = call.FindStorage(meta)) {
    return OnCpu(meta, twin->original.storage());
  }
  const c10::StorageImpl* const key = StorageOf(meta);
  for (const auto& [of, made] : adopted_) {
    if (of == key) return OnCpu(meta, made);
  }
  adopted_.emplace_back(
      key,
      TracedMemory::Fake(static_cast<int64_t>(meta.storage().nbytes()), log_));
  return OnCpu(meta, adopted_.back().second);
}

// The twins get memory for the time, and what comes of them is treated as what
// a kernel of meta gives.
void Tracer::RunOnZeros(const c10::OperatorHandle& op,
                        const TracedOperator& info, c10::DispatchKeySet keys,
                        torch::jit::Stack* stack) {
  if (info.info->c10d) {
    Fail(info,
         "is a collective, which a trace cannot run: other ranks would "
         "have to take part. Plan the module without it.");
  }
  MetaCall call(*stack, info.arguments, info.device);
  int64_t bytes = 0;
  for (const MetaCall::Twin& twin : call.twins()) {
    bytes += static_cast<int64_t>(twin.original.storage().nbytes());
  }
  std::vector<c10::IValue> results;
  if (bytes > options_.compute_bytes) {
    if (info.if_large == nullptr) {
      Fail(info, absl::StrCat(
                     "has no rule for the sizes of its results, and its "
                     "arguments have ",
                     bytes,
                     " bytes, too many to find out by computing on "
                     "zeros (at most ",
                     options_.compute_bytes,
                     "). Register a kernel of it for the Meta device, or plan "
                     "a smaller batch."));
    }
    Unseen unseen;
    results = info.if_large(OperatorArguments(call.arguments()));
  } else {
    Unseen unseen;
    results = call.OnZeros();
    op.redispatchBoxed(BelowBelow(keys), &results);
  }
  Return(info, call, results, stack);
}

void Tracer::Record(const TracedOperator& info, const MetaCall& call,
                    const std::vector<c10::IValue>& results) {
  if (log_ == nullptr) return;
  const OperatorArguments arguments(call.arguments());
  log_->Operator(info.name(), KernelMemory(info.name(), arguments, results),
                 OperatorFlops(info.name(), arguments, results),
                 OperatorMovedBytes(info.name(), arguments, results));
}

}  // namespace tessera
