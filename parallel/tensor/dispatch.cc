// Where every operator that gets a placed tensor comes first. In this order:
//
//   a rule (rules.h)          parts are computed with parts
//   a composite               is taken apart; its operators come here
//   anything else             gets wholes and runs on every rank: right, and
//   slow,
//                             so a line is logged once for each such operator
//
// What is written in place keeps its placement in each case.
#include <torch/torch.h>

#include <string>
#include <utility>
#include <vector>

#include "ATen/core/dispatch/Dispatcher.h"
#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/above/above_autograd.h"
#include "base/log.h"
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

// Runs the operator on wholes, and writes what it has written to the parts.
void RunOnWholes(PlacedCall& call) {
  TellOnce(call.op());
  const auto group = call.group();
  const auto& arguments = call.op().schema().arguments();
  std::vector<std::pair<at::Tensor, at::Tensor>> written;  // placed, whole
  for (size_t i = 0; i < call.size(); ++i) {
    const at::Tensor given = call.tensor(i);
    call[i] = WholeOf(call[i]);
    if (PlacedOf(given) != nullptr && arguments[i].alias_info() != nullptr &&
        arguments[i].alias_info()->isWrite()) {
      written.emplace_back(given, call.tensor(i));
    }
  }
  call.Run();
  for (const auto& [placed, whole] : written) {
    const Placed& of = *PlacedOf(placed);
    of.part.copy_(group->Slice(whole, of.placement.dim));
    RenewHistory(placed);
    if (call.size() > 0 && call.tensor(0).is_same(whole)) call[0] = placed;
  }
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
