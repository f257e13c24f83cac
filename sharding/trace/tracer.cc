#include "sharding/trace/tracer.h"

#include <algorithm>
#include <utility>

#include "ATen/SequenceNumber.h"
#include "absl/strings/str_cat.h"
#include "base/above/above_autograd.h"
#include "base/check.h"
#include "base/torch/storage_access.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "c10/core/TensorImpl.h"
#include "sharding/dispatch/operator_info.h"
#include "sharding/dispatch/stack_tensors.h"
#include "sharding/trace/traced_memory.h"
#include "torch/csrc/autograd/function.h"

namespace tessera {
namespace {

thread_local Tracer* t_current = nullptr;

bool IsPlain(const at::Tensor& t) {
  return t.has_storage() && t.layout() == at::kStrided && t.is_cpu();
}

}  // namespace

Tracer::Tracer(const TracerOptions& options, std::shared_ptr<TraceLog> log)
    : options_(options), log_(std::move(log)) {}

Tracer::~Tracer() = default;

Tracer::Scope::Scope(Tracer* tracer)
    : below_(tracer),
      above_(c10::DispatchKeySet(kAboveKey)),
      no_tag_(c10::DispatchKeySet(kTagKey)) {
  TESSERA_CHECK(t_current == nullptr) << "traces are not nested";
  t_current = tracer;
}

Tracer::Scope::~Scope() { t_current = nullptr; }

bool Tracer::IsParameter(const at::Tensor& t) const {
  return IsPlain(t) && parameters_.contains(StorageOf(t));
}

void Tracer::Begin(const at::Tensor& parameter) const {
  if (log_ != nullptr) log_->Begins(parameters_.at(StorageOf(parameter)));
}

Tracer* Tracer::Current() { return t_current; }

void Tracer::AddParameter(const at::Tensor& t, int32_t parameter,
                          std::string module) {
  parameters_.try_emplace(StorageOf(t), parameter);
  modules_.resize(
      std::max(modules_.size(), static_cast<size_t>(parameter) + 1));
  modules_[static_cast<size_t>(parameter)] = std::move(module);
}

const TracedOperator& Tracer::InfoOf(const c10::OperatorHandle& op) {
  auto& entry = operators_[&op.schema()];
  if (entry == nullptr) {
    entry = std::make_unique<TracedOperator>(TracedOperator::Of(op));
  }
  return *entry;
}

std::string Tracer::Where(const std::string& op) const {
  const int32_t unit = log_ == nullptr ? -1 : log_->unit();
  return absl::StrCat("[",
                      unit < 0 ? "before the first module"
                               : modules_[static_cast<size_t>(unit)],
                      "] ", op);
}

void Tracer::Fail(const TracedOperator& info, const std::string& what) const {
  ThrowIfError(absl::FailedPreconditionError(
      absl::StrCat(Where(info.name()), " ", what)));
  std::abort();  // never reached
}

bool Tracer::Known(const at::Tensor& t) const {
  if (!IsPlain(t)) return false;
  c10::StorageImpl* const storage = StorageOf(t);
  if (const TracedMemory* const memory = TracedMemory::Of(storage)) {
    return memory->known();
  }
  // From outside: the user's inputs and tables, a real module's buffers.
  return static_cast<int64_t>(storage->nbytes()) <= options_.known_bytes &&
         !HasTag(t) && !changed_.contains(storage);
}

// And what it writes is the trace's own.
bool Tracer::AllKnown(const TracedOperator& info,
                      const torch::jit::Stack& stack) const {
  bool known = true;
  ForEachDefinedTensor(stack, info.arguments,
                       [&](const at::Tensor& t, size_t i) {
                         known = known && Known(t) &&
                                 (!info.info->writes[i] ||
                                  TracedMemory::Of(StorageOf(t)) != nullptr);
                       });
  return known;
}

void Tracer::TellUses(const TracedOperator& info,
                      const torch::jit::Stack& stack) {
  if (log_ == nullptr) return;
  if (log_->backward()) TellNode();
  const int64_t before = log_->num_events();
  ForEachDefinedTensor(stack, info.arguments,
                       [&](const at::Tensor& t, size_t i) {
                         if (t.has_storage())
                           TellUse(info, info.info->writes[i], StorageOf(t));
                       });
  if (info.info->name == "aten::copy_") TellCast(stack);
  if (log_->backward()) return;
  // None yet; the number before the first is that of nodes that add up
  // gradients.
  if (at::sequence_number::peek() == 0) return;
  const uint64_t node = at::sequence_number::peek() - 1;
  nodes_.try_emplace(node, Node{log_->unit(), before});
}

// Sets on whose behalf the following operators run.
void Tracer::TellNode() {
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr) return;
  const auto found = nodes_.find(node->sequence_nr());
  if (found == nodes_.end()) return;
  log_->SetUnit(found->second.unit, found->second.forward);
}

void Tracer::TellUse(const TracedOperator& info, bool written,
                     c10::StorageImpl* storage) {
  const auto parameter = parameters_.find(storage);
  if (parameter != parameters_.end()) {
    if (!log_->backward()) log_->SetUnit(parameter->second);
    if (info.uses_values()) log_->Touched(parameter->second);
    return;
  }
  const TracedMemory* const memory = TracedMemory::Of(storage);
  if (memory != nullptr && memory->log() == log_ && memory->allocation() >= 0) {
    log_->Used(memory->allocation(), info.uses_values(), written);
  }
}

// copy_(to, from), as all casts end.
void Tracer::TellCast(const torch::jit::Stack& stack) {
  const at::Tensor& to = torch::jit::peek(stack, 0, 3).toTensor();
  const at::Tensor& from = torch::jit::peek(stack, 1, 3).toTensor();
  if (!IsPlain(to) || !IsPlain(from) || to.dtype() == from.dtype()) return;
  const auto parameter = parameters_.find(StorageOf(from));
  if (parameter == parameters_.end()) return;
  const TracedMemory* const memory = TracedMemory::Of(StorageOf(to));
  if (memory == nullptr || memory->log() != log_) return;
  if (memory->allocation() < 0) return;
  log_->IsCast(memory->allocation(), parameter->second);
}

void Tracer::Forget(const at::Tensor& written) {
  c10::StorageImpl* const storage = StorageOf(written);
  if (const TracedMemory* const memory = TracedMemory::Of(storage)) {
    if (memory->known()) TracedMemory::Forget(storage);
  } else {
    changed_.insert(storage);
  }
}

void Tracer::RunBelow(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                      torch::jit::Stack* stack) {
  const TracedOperator& info = InfoOf(op);
  TellUses(info, *stack);
  bool plain = true;
  ForEachDefinedTensor(
      *stack, info.arguments,
      [&](const at::Tensor& t, size_t) { plain = plain && IsPlain(t); });
  if (info.kind == TracedOperator::Kind::kComposite || !plain) {
    op.redispatchBoxed(BelowBelow(keys), stack);
    return;
  }
  if (info.kind == TracedOperator::Kind::kView) {
    c10::impl::ExcludeDispatchKeyGuard unseen{c10::DispatchKeySet(kBelowKey)};
    op.redispatchBoxed(BelowBelow(keys), stack);
    return;
  }
  // What an operator refuses is told with its name and module.
  ThrowIfError(
      CatchTorch(Where(info.name()), [&] { Dispatch(op, info, keys, stack); }));
}

void Tracer::Dispatch(const c10::OperatorHandle& op, const TracedOperator& info,
                      c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  switch (info.kind) {
    case TracedOperator::Kind::kEqual:
      RunEqual(op, info, keys, stack);
      break;
    case TracedOperator::Kind::kSizes:
      RunWithoutValues(op, info, keys, stack);
      break;
    case TracedOperator::Kind::kValues:
      if (!AllKnown(info, *stack)) {
        Fail(info,
             "asks for values, which a plan does not compute: what it returns "
             "depends on weights or inputs. Let the model not depend on them "
             "while it is planned (a fixed capacity instead of nonzero, no "
             "item() in forward).");
      }
      RunReally(op, info, keys, stack);
      break;
    default:
      if (AllKnown(info, *stack)) {
        RunReally(op, info, keys, stack);
      } else {
        RunOnZeros(op, info, keys, stack);
      }
  }
}

void Tracer::RunReally(const c10::OperatorHandle& op,
                       const TracedOperator& info, c10::DispatchKeySet keys,
                       torch::jit::Stack* stack) {
  std::vector<c10::StorageImpl*> given;
  torch::jit::Stack arguments(
      stack->end() - static_cast<int64_t>(info.arguments), stack->end());
  ForEachDefinedTensor(arguments, arguments.size(),
                       [&](const at::Tensor& t, size_t) {
                         if (TracedMemory::Of(StorageOf(t)) == nullptr) {
                           given.push_back(StorageOf(t));
                         }
                       });
  {
    c10::impl::ExcludeDispatchKeyGuard unseen{c10::DispatchKeySet(kBelowKey)};
    op.redispatchBoxed(BelowBelow(keys), stack);
  }
  const auto follow = [&](const at::Tensor& t, size_t) {
    if (!IsPlain(t)) return;
    c10::StorageImpl* const storage = StorageOf(t);
    if (TracedMemory::Of(storage) != nullptr ||
        std::find(given.begin(), given.end(), storage) != given.end()) {
      return;
    }
    TracedMemory::Follow(storage, log_);
    if (static_cast<int64_t>(storage->nbytes()) > options_.known_bytes) {
      TracedMemory::Forget(storage);
    }
  };
  ForEachDefinedTensor(*stack, info.returns, follow);
  // What was resized has other memory.
  ForEachDefinedTensor(arguments, arguments.size(), follow);
  if (log_ != nullptr) log_->Operator(info.name(), 0, 0, 0);
}

// Attention asks whether its queries are its keys: those of one memory are, and
// what is not known differs.
void Tracer::RunEqual(const c10::OperatorHandle& op, const TracedOperator& info,
                      c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (AllKnown(info, *stack)) {
    RunReally(op, info, keys, stack);
    return;
  }
  const at::Tensor other = torch::jit::pop(*stack).toTensor();
  const at::Tensor self = torch::jit::pop(*stack).toTensor();
  stack->emplace_back(StorageOf(self) == StorageOf(other) &&
                      self.storage_offset() == other.storage_offset() &&
                      self.sizes() == other.sizes() &&
                      self.strides() == other.strides());
}

}  // namespace tessera
