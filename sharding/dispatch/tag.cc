// Why the dispatcher, below every call: C++ modules have no hooks and forward
// is not virtual, so nowhere else is it known that a parameter is about to be
// read. An operator that slipped by would read freed memory, or write where the
// next gather overwrites it.
//
// Why all flats of an operator are pinned before it runs, and none is unpinned
// until its results are tagged: gathering the second may free the first to keep
// the limit of live parameters, and a result that aliases a flat without a tag
// would be read later without a gather.
//
// Why the tag is excluded below `aten::` operators only: nothing inside of
// those is user code, so their inner operators can see none but the pinned
// arguments; a user's operator may use a weight that it captured, which is no
// argument.
#include "sharding/dispatch/tag.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/core/grad_mode.h"
#include "ATen/core/stack.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/memory/write_faults.h"
#include "base/step_memory/tensor_bytes.h"
#include "base/torch/storage_access.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "c10/core/InferenceMode.h"
#include "c10/core/impl/LocalDispatchKeySet.h"
#include "sharding/construct/construction.h"
#include "sharding/dispatch/autocast.h"
#include "sharding/dispatch/batch_norms.h"
#include "sharding/dispatch/cast_inputs.h"
#include "sharding/dispatch/operator_info.h"
#include "sharding/dispatch/operator_watch.h"
#include "sharding/dispatch/rebind.h"
#include "sharding/dispatch/saved_casts.h"
#include "sharding/dispatch/stack_tensors.h"
#include "sharding/dispatch/undeclared_writes.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/flat/pins.h"
#include "sharding/flat/registry.h"
#include "torch/csrc/autograd/graph_task.h"
#include "torch/csrc/distributed/c10d/Work.hpp"
#include "torch/library.h"

namespace tessera {
namespace {

// Where a checkpoint may run what it will compute again in backward.
bool OutsideOfGraph() {
  return !at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled() &&
         torch::autograd::get_current_graph_task_id() == -1 &&
         !ReplayMark::IsSet();
}

// Whether the operator writes all of its first argument's storage and reads
// nothing of it.
bool OverwritesFirst(const OperatorInfo& info, const torch::jit::Stack& stack) {
  if (!info.overwrites) return false;
  const at::Tensor& first = stack[stack.size() - info.writes.size()].toTensor();
  const c10::StorageImpl* const storage =
      first.storage().unsafeGetStorageImpl();
  bool read = !first.is_non_overlapping_and_dense() ||
              first.nbytes() != storage->nbytes();
  ForEachTensorOf(stack, info.writes.size(),
                  [&](const at::Tensor& t, size_t i) {
                    read |= i > 0 && t.defined() && t.has_storage() &&
                            t.storage().unsafeGetStorageImpl() == storage;
                  });
  return !read;
}

// What an operator holds while it runs.
struct Held {
  PinSet pins;
  EvictablePins evictables;
  UndeclaredWrites undeclared;
};

bool IsOneRanks(const FlatParameter& flat) {
  return flat.communicator()->world_size() == 1 && flat.replicas() == nullptr;
}

// Each rank's running statistics are those of its own data, and a parameter is
// one for all ranks: each owner's part would be of another rank.
absl::Status CheckStatistic(const OperatorInfo& info,
                            const StorageOwner& owned) {
  const FlatParameter& flat = *owned.flat;
  if (IsOneRanks(flat)) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "[", flat.name(), "] parameter '", owned.parameter(),
      "' is a running statistic that ", info.name,
      " updates, on each rank with its own data; register it with "
      "register_buffer, or name it in sharding.ignored_parameters"));
}

// Whether the places that it writes in `written`, its argument, may depend on
// its input: another argument is an index or a mask, or `written` is a part of
// the parameter, which was chosen before.
bool WritesPlaces(const OperatorInfo& info, const torch::jit::Stack& stack,
                  size_t argument, const at::Tensor& written,
                  const StorageOwner& owned) {
  if (info.c10d) return false;
  bool indexed = false;
  ForEachTensorOf(
      stack, info.writes.size(), [&](const at::Tensor& t, size_t i) {
        indexed |= i != argument && t.defined() &&
                   at::isIntegralType(t.scalar_type(), /*includeBool=*/true);
      });
  if (indexed) return true;
  const auto& parameters = owned.flat->parameters();
  return std::none_of(parameters.begin(), parameters.end(), [&](const auto& p) {
    return p.slot == owned.slot && p.tensor.numel() == written.numel() &&
           p.tensor.storage_offset() == written.storage_offset();
  });
}

void PrepareWrites(const OperatorInfo& info, const torch::jit::Stack& stack,
                   size_t argument, const at::Tensor& tensor,
                   const StorageOwner& owned, UndeclaredWrites* undeclared) {
  const bool statistic = info.UpdatesStatistic(stack, argument);
  if (statistic) ThrowIfError(CheckStatistic(info, owned));
  if (statistic || info.writes[argument]) {
    ThrowIfError(owned.flat->PrepareWrite());
    if (!IsOneRanks(*owned.flat)) {
      const bool placed = WritesPlaces(info, stack, argument, tensor, owned);
      owned.flat->NotePlacedWrite(owned.slot, placed ? info.name : "");
    }
  } else if (info.promises && owned.flat->options().check_writes) {
    undeclared->Watch(owned.flat);
  }
}

// Whoever follows the uses of parameters may end what it follows before this
// operator: first, and apart from the pins.
void TellUses(const OperatorInfo& info, const torch::jit::Stack& stack) {
  ParameterUses* const uses = CurrentParameterUses();
  if (uses == nullptr) return;
  ForEachTensorOf(stack, info.writes.size(), [&](const at::Tensor& t, size_t) {
    if (!t.defined() || !HasTag(t)) return;
    if (StorageOwner owned = Registry::Global().Find(t)) uses->Used(owned);
  });
}

// Returns whether one of the flats wants its inputs cast.
bool PinArguments(const OperatorInfo& info, const torch::jit::Stack& stack,
                  Held* held) {
  const bool outside = OutsideOfGraph();
  const bool constructs = Construction::Current() != nullptr;
  bool casts_inputs = false;
  ForEachTensorOf(
      stack, info.writes.size(), [&](const at::Tensor& t, size_t i) {
        if (!t.defined() || !(HasTag(t) || constructs)) return;
        StorageOwner owned = Registry::Global().Find(t);
        if (!owned) {
          if (IsEvictable(t)) {
            held->evictables.Add(t, i == 0 && OverwritesFirst(info, stack));
          }
          return;
        }
        held->pins.Add(owned.flat);
        NoteUnitUse(owned.flat->memory_unit(owned.slot));
        PrepareWrites(info, stack, i, t, owned, &held->undeclared);
        if (outside) owned.flat->used_without_grad() = true;
        casts_inputs |= owned.flat->cast_inputs();
      });
  return casts_inputs;
}

void TagAliases(size_t num_returns, const torch::jit::Stack& stack) {
  Construction* const construction = Construction::Current();
  ForEachTensorOf(stack, num_returns, [&](const at::Tensor& t, size_t) {
    if (construction != nullptr) construction->Note(t);
    if (!t.defined() || HasTag(t)) return;
    if (Registry::Global().Find(t) || IsEvictable(t)) AddTag(t);
  });
}

// A collective of the user's own on parameters goes on after its operator has
// returned: it is over before the pins go.
void WaitForWork(size_t num_returns, const torch::jit::Stack& stack) {
  for (size_t i = stack.size() - num_returns; i < stack.size(); ++i) {
    if (!stack[i].isCustomClass()) continue;
    auto work = stack[i].toCustomClass<c10d::Work>();
    if (work) work->wait();
  }
}

void Redispatch(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                torch::jit::Stack* stack, bool exclude) {
  const auto below =
      keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kTagKey);
  if (exclude) {
    c10::impl::ExcludeDispatchKeyGuard guard{c10::DispatchKeySet(kTagKey)};
    op.redispatchBoxed(below, stack);
  } else {
    op.redispatchBoxed(below, stack);
  }
}

// As Redispatch, while autocast is on. Its casts must be seen: nothing is
// excluded. The user's cache is for others than parameters.
void RedispatchUnderAutocast(const c10::OperatorHandle& op,
                             c10::DispatchKeySet keys, bool has_parameters,
                             torch::jit::Stack* stack) {
  std::optional<NoAutocastCache> no_cache;
  if (has_parameters && AutocastTakes(keys)) no_cache.emplace();
  Redispatch(op, keys, stack, /*exclude=*/false);
}

// aten::_to_copy: what it casts of a parameter is not kept for backward.
void RedispatchCopy(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                    torch::jit::Stack* stack) {
  const at::Tensor source =
      torch::jit::peek(*stack, 0, op.schema().arguments().size()).toTensor();
  Redispatch(op, keys, stack, /*exclude=*/true);
  if (!HasTag(source)) return;
  c10::IValue& cast = stack->back();
  cast = WithCachedHistory(source, cast.toTensor());
  RememberCast(source, cast.toTensor());
}

// How an operator is to run.
struct HowToRun {
  bool exclude = false;         // the tag, below it
  bool has_parameters = false;  // among its arguments
};

void Run(const c10::OperatorHandle& op, const OperatorInfo& info,
         c10::DispatchKeySet keys, torch::jit::Stack* stack, HowToRun how) {
  if (info.copies) {
    RedispatchCopy(op, keys, stack);
  } else if (AutocastIsOn()) {
    RedispatchUnderAutocast(op, keys, how.has_parameters, stack);
  } else {
    Redispatch(op, keys, stack, how.exclude);
  }
}

// As Run. What is made of other operators is not the watch's: these come to the
// fallback by themselves.
void RunWatched(const c10::OperatorHandle& op, const OperatorInfo& info,
                c10::DispatchKeySet keys, torch::jit::Stack* stack,
                bool has_parameters) {
  OperatorWatch* const watch = OperatorWatch::Current();
  const HowToRun how{info.aten, has_parameters};
  if (watch == nullptr || watch->within()) {
    Run(op, info, keys, stack, how);
  } else if (info.composite || AutocastTakes(keys)) {
    OperatorWatch::Composite composite(watch);
    if (!info.aten) watch->BeginMade(op, info, stack);
    Run(op, info, keys, stack, {/*exclude=*/false, has_parameters});
    if (!info.aten) watch->EndMade(op);
  } else if (watch->Replace(op, info, stack)) {
    return;
  } else if (!watch->Begin(op, info, stack)) {
    Run(op, info, keys, stack, how);
  } else {
    auto failed = absl::MakeCleanup([watch] { watch->Failed(); });
    {
      OperatorWatch::Within within(watch);
      Run(op, info, keys, stack, how);
    }
    std::move(failed).Cancel();
    watch->End(op, info, stack);
  }
}

void Compute(const c10::OperatorHandle& op, const OperatorInfo& info,
             c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const size_t num_returns = op.schema().returns().size();
  TellUses(info, *stack);
  const WriteFaults::Culprit culprit(info.aten ? nullptr : info.name.c_str());
  Held held;
  const bool casts_inputs = PinArguments(info, *stack, &held);
  std::optional<at::ScalarType> result_dtype;
  if (casts_inputs && info.input_casts != InputCasts::kNone &&
      !AutocastTakes(keys)) {
    result_dtype = CastInputs(op, info.input_casts, stack);
  }
  RunWatched(op, info, keys, stack, !held.pins.empty());
  if (result_dtype) CastFirstResult(num_returns, *result_dtype, stack);
  const bool constructs =
      !held.evictables.empty() || Construction::Current() != nullptr;
  if (held.pins.empty() && !constructs) return;
  TagAliases(num_returns, *stack);
  if (info.c10d) WaitForWork(num_returns, *stack);
  held.undeclared.Check(info.name);
  if (constructs) held.evictables.ClearAndTrim();
}

// What modules and functionals call.
bool IsBatchNorm(const OperatorInfo& info) {
  return !info.statistics.empty() && info.name == "aten::batch_norm";
}

void Fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
              torch::jit::Stack* stack) {
  const OperatorInfo& info = OperatorInfo::Of(op);
  switch (info.kind) {
    case OperatorInfo::Kind::kSet:
      if (SetBecomesWrite(op, stack)) return;
      break;
    case OperatorInfo::Kind::kSetData:
      SetDataBecomesWrite(stack);
      [[fallthrough]];
    case OperatorInfo::Kind::kTransparent:
      Redispatch(op, keys, stack, /*exclude=*/false);
      TagAliases(op.schema().returns().size(), *stack);
      return;
    case OperatorInfo::Kind::kCompute:
      break;
  }
  if (IsBatchNorm(info) && RunBatchNormReplacement(stack)) return;
  Compute(op, info, keys, stack);
}

TORCH_LIBRARY_IMPL(_, DeferredInit, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&Fallback>());
}

}  // namespace

absl::Status CheckTagFallback() {
  if (c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(kTagKey)) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      "libtorch's dispatch key DeferredInit has no fallback: "
      "//sharding/dispatch:tag was not linked whole (it needs alwayslink)");
}

}  // namespace tessera
