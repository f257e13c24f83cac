// Where every operator that gets a placed tensor comes first. In this order:
//
//   a rule (rules.h)          parts are computed with parts
//   a composite               is taken apart; its operators come here
//   anything else             gets wholes, on every rank: right, and slow, so
//                             a line is logged once for each such operator
//
// What is written in place keeps its placement in each case.
#include <torch/torch.h>

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/dispatch/Dispatcher.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/above/above_autograd.h"
#include "base/log.h"
#include "base/torch_guard.h"
#include "parallel/tensor/placed.h"
#include "parallel/tensor/rules.h"

namespace tessera {
namespace {

struct Known {
  PlacedRule rule = nullptr;
  bool composite = false;
};

const Known& KnownOf(const c10::OperatorHandle& op) {
  // By schema, which lives as long as the operator.
  thread_local absl::flat_hash_map<const c10::FunctionSchema*, Known> all;
  auto [it, is_new] = all.try_emplace(&op.schema());
  if (is_new) {
    it->second.rule = FindRule(op);
    it->second.composite = op.hasKernelForDispatchKey(
                               c10::DispatchKey::CompositeImplicitAutograd) &&
                           !op.hasKernelForDispatchKey(c10::DispatchKey::CPU);
  }
  return it->second;
}

void TellOnce(const c10::OperatorHandle& op) {
  static absl::Mutex mutex(absl::kConstInit);
  static auto* told = new absl::flat_hash_set<const c10::FunctionSchema*>();
  {
    absl::MutexLock lock(&mutex);
    if (!told->insert(&op.schema()).second) return;
  }
  TESSERA_LOG_RANK0(WARNING)
      << "tensor parallelism: " << op.schema().name()
      << " has no rule for the parts that it gets here, so each rank gathers "
         "them and computes all of it";
}

c10::IValue WholeOf(const c10::IValue& value) {
  if (value.isTensor()) return Whole(value.toTensor());
  if (value.isTensorList()) {
    std::vector<at::Tensor> wholes = value.toTensorVector();
    for (at::Tensor& each : wholes) each = Whole(each);
    return wholes;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> wholes;
    for (const std::optional<at::Tensor>& each :
         value.toOptionalTensorVector()) {
      wholes.push_back(each.has_value()
                           ? std::optional<at::Tensor>(Whole(*each))
                           : std::nullopt);
    }
    return wholes;
  }
  return value;
}

[[noreturn]] void RefuseWrite(const c10::OperatorHandle& op) {
  ThrowIfError(absl::FailedPreconditionError(absl::StrCat(
      op.schema().name(),
      " would write to a view of a tensor that is divided among ranks, and "
      "there is no such view of its parts: write to the tensor itself, or to "
      "a clone()")));
  std::abort();
}

// Has results that may be views of a whole remembered as such.
void MarkViews(PlacedCall& call, size_t results) {
  const auto group = call.group();
  const auto mark = [&group](const at::Tensor& t) {
    return t.defined() && PlacedOf(t) == nullptr
               ? Place(t, TensorPlacement::WholeView(), group)
               : t;
  };
  for (size_t i = 0; i < results; ++i) {
    if (call[i].isTensor()) {
      call[i] = mark(call.tensor(i));
    } else if (call[i].isTensorList()) {
      std::vector<at::Tensor> views = call[i].toTensorVector();
      for (at::Tensor& each : views) each = mark(each);
      call[i] = views;
    }
  }
}

// Runs the operator on wholes, and writes what it has written to the parts.
void RunOnWholes(PlacedCall& call) {
  const auto group = call.group();
  const auto& arguments = call.op().schema().arguments();
  std::vector<std::pair<at::Tensor, at::Tensor>> written;  // placed, whole
  bool gathers = false, views = false;
  for (size_t i = 0; i < call.size(); ++i) {
    const at::Tensor given = call.tensor(i);
    const Placed* const placed = PlacedOf(given);
    call[i] = WholeOf(call[i]);
    if (placed == nullptr) continue;
    const bool is_view = placed->placement == TensorPlacement::WholeView();
    gathers |= !is_view;
    const c10::AliasInfo* const alias = arguments[i].alias_info();
    if (alias == nullptr) continue;
    if (!alias->isWrite()) {
      views = true;
    } else if (is_view) {
      RefuseWrite(call.op());
    } else {
      written.emplace_back(given, call.tensor(i));
    }
  }
  if (gathers) TellOnce(call.op());
  call.Run();
  for (const auto& [placed, whole] : written) {
    const Placed& of = *PlacedOf(placed);
    of.part.copy_(group->Slice(whole, of.placement.dim));
    RenewHistory(placed);
    if (call.size() > 0 && call.tensor(0).is_same(whole)) call[0] = placed;
  }
  if (views) MarkViews(call, call.op().schema().returns().size());
}

bool OnPlaced(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/,
              torch::jit::Stack* stack) {
  PlacedCall call(op, stack);
  if (call.group() == nullptr) return false;
  const Known known = KnownOf(op);
  if (known.rule != nullptr && known.rule(call)) return true;
  if (known.composite) {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  } else {
    RunOnWholes(call);
  }
  return true;
}

// Before a trace, which sees the operators of parts.
[[maybe_unused]] const bool added = AddAboveHandler(&OnPlaced, /*rank=*/1);

}  // namespace
}  // namespace tessera
