// Where every operator that gets a placed tensor comes first. In this order:
//
//   copies alone              are used as they are (copies.cc)
//   a rule (rules.h)          parts are computed with parts
//   a composite               is taken apart; its operators come here
//   anything else             gets wholes, on every rank: right, and slow, so
//                             a line is logged once for each such operator
//
// What is written in place keeps its placement in each case.
#include <torch/torch.h>

#include <cstdlib>
#include <memory>
#include <optional>
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

void TellOnce(const c10::OperatorHandle& op, const PartGroup& group) {
  if (group.on_gathered() != nullptr) {
    group.on_gathered()(op.schema().name());
    return;
  }
  static absl::Mutex mutex(absl::kConstInit);
  static auto* told = new absl::flat_hash_set<const c10::FunctionSchema*>();
  {
    absl::MutexLock lock(&mutex);
    if (!told->insert(&op.schema()).second) return;
  }
  TESSERA_LOG_RANK0(WARNING)
      << op.schema().name()
      << " has no rule for the parts of tensors that it gets here, so each "
         "rank gathers them and computes all of it";
}

[[noreturn]] void RefuseWrite(const c10::OperatorHandle& op) {
  ThrowIfError(absl::FailedPreconditionError(absl::StrCat(
      op.schema().name(),
      " would write to a view of a tensor that is divided among ranks, and "
      "there is no such view of its parts: write to the tensor itself, or to "
      "a clone()")));
  std::abort();
}

[[noreturn]] void RefuseSizes(const c10::OperatorHandle& op) {
  ThrowIfError(absl::FailedPreconditionError(absl::StrCat(
      op.schema().name(),
      " would change the sizes of a tensor that is divided among ranks: call "
      "the operator that returns another tensor")));
  std::abort();
}

// The wholes that an operator gets.
class Wholes {
 public:
  explicit Wholes(PlacedCall* call) : call_(*call), group_(call->group()) {}

  // Puts them in the place of what is placed among the arguments.
  void Give() {
    const auto& arguments = call_.op().schema().arguments();
    for (size_t i = 0; i < call_.size(); ++i) {
      const c10::AliasInfo* const alias = arguments[i].alias_info();
      call_[i] = WithTensorsOf(
          call_[i], [&](const at::Tensor& t) { return Of(t, alias); });
    }
  }
  // Whether some are not there yet.
  bool gathers() const { return gathers_; }

  // Writes what the operator has written to the parts, and has results that
  // are written wholes, or may be views of wholes, be placed.
  void TakeBack() {
    for (const auto& [placed, whole] : written_) {
      const Placed& of = *PlacedOf(placed);
      if (whole.sizes() != placed.sizes()) RefuseSizes(call_.op());
      of.part.copy_(PartAs(whole, of.placement, group_));
      RenewHistory(placed);
    }
    for (size_t i = 0; i < call_.op().schema().returns().size(); ++i) {
      call_[i] = WithTensorsOf(
          call_[i], [&](const at::Tensor& t) { return PlacedResult(t); });
    }
  }

 private:
  at::Tensor Of(const at::Tensor& given, const c10::AliasInfo* alias) {
    const Placed* const placed = PlacedOf(given);
    if (placed == nullptr) return given;
    const bool is_view = placed->placement.kind == TensorPlacement::kWholeView;
    const bool writes = alias != nullptr && alias->isWrite();
    if (writes && is_view) RefuseWrite(call_.op());
    for (const auto& [other, whole] : written_) {
      if (writes && other.is_same(given)) return whole;
    }
    at::Tensor whole = Whole(given);
    gathers_ |= placed->placement.kind == TensorPlacement::kShard;
    if (writes) written_.emplace_back(given, whole);
    views_ |= alias != nullptr && !writes;
    return whole;
  }

  at::Tensor PlacedResult(const at::Tensor& result) const {
    if (!result.defined() || PlacedOf(result) != nullptr) return result;
    for (const auto& [placed, whole] : written_) {
      if (result.is_same(whole)) return placed;
    }
    return views_ ? Place(result, TensorPlacement::WholeView(), group_)
                  : result;
  }

  PlacedCall& call_;
  const std::shared_ptr<PartGroup> group_;
  std::vector<std::pair<at::Tensor, at::Tensor>> written_;  // placed, whole
  bool gathers_ = false;
  bool views_ = false;
};

void RunOnWholes(PlacedCall& call) {
  Wholes wholes(&call);
  wholes.Give();
  if (wholes.gathers()) TellOnce(call.op(), *call.group());
  call.Run();
  wholes.TakeBack();
}

bool OnPlaced(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/,
              torch::jit::Stack* stack) {
  PlacedCall call(op, stack);
  if (call.group() == nullptr) return false;
  const CollectivesOf name(op.schema().name());
  if (CopyRule(call)) return true;
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
