#include "sharding/recompute/checkpointed/checkpoint_watch.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/torch/storage_access.h"
#include "base/torch_guard.h"
#include "sharding/dispatch/stack_tensors.h"
#include "sharding/flat/registry.h"
#include "sharding/recompute/checkpointed/tensor_copies.h"

namespace tessera {

bool CheckpointWatch::Begin(const c10::OperatorHandle& op,
                            const OperatorInfo& info,
                            torch::jit::Stack* stack) {
  return Follow(op, info, stack, /*own=*/true);
}

// An operator of the user's that says what it writes is not followed, so that
// those within it are seen: it may write what it captured.
bool CheckpointWatch::Follow(const c10::OperatorHandle& op,
                             const OperatorInfo& info, torch::jit::Stack* stack,
                             bool own) {
  const bool outer =
      outer_ != nullptr && outer_->Follow(op, info, stack, /*own=*/false);
  RefuseParameters(info, *stack);
  running_ = op;
  DoBegin(op, info, stack, own);
  const bool followed = outer || info.aten || info.writes_are_guessed() ||
                        (own && IsKept(frame_->options, info));
  if (!followed) running_.reset();
  return followed;
}

void CheckpointWatch::End(const c10::OperatorHandle& op,
                          const OperatorInfo& info, torch::jit::Stack* stack) {
  if (outer_ != nullptr) outer_->End(op, info, stack);
  ForEachDefinedTensor(*stack, op.schema().returns().size(),
                       [&](const at::Tensor& t, size_t) { MadeInside(t); });
  DoEnd(op, info, stack);
  running_.reset();
}

void CheckpointWatch::BeginMade(const c10::OperatorHandle& op,
                                const OperatorInfo& info,
                                torch::jit::Stack* stack) {
  if (outer_ != nullptr) outer_->BeginMade(op, info, stack);
  RefuseParameters(info, *stack);
  DoBeginMade(op, info, stack);
}

void CheckpointWatch::EndMade(const c10::OperatorHandle& op) {
  if (outer_ != nullptr) outer_->EndMade(op);
  DoEndMade(op);
}

bool CheckpointWatch::IsInside(const at::Tensor& tensor) const {
  const auto* storage = StorageOf(tensor);
  return storage == nullptr || inside_.Contains(storage);
}

void CheckpointWatch::RefuseParameters(const OperatorInfo& info,
                                       const torch::jit::Stack& stack) const {
  if (info.writes_are_guessed()) return;
  ForEachDefinedTensor(
      stack, info.writes.size(), [&](const at::Tensor& t, size_t i) {
        if (!info.MayWrite(stack, i)) return;
        const StorageOwner owned = Registry::Global().Find(t);
        if (!owned) return;
        ThrowIfError(absl::FailedPreconditionError(absl::StrCat(
            "[", frame_->options.name, "] operator ", info.name,
            " writes parameter '", owned.parameter(),
            "' in a checkpointed region, expected that parameters are only "
            "read "
            "there, since backward runs the region again; write it before or "
            "after the region")));
      });
}

// ---- forward

ForwardWatch::ForwardWatch(Frame* frame, OperatorWatch* outer)
    : CheckpointWatch(frame, dynamic_cast<CheckpointWatch*>(outer)),
      outer_(outer),
      kept_(&frame->kept_operators, outer) {}

void ForwardWatch::BeforeWrite(const OperatorInfo& info, const at::Tensor& t,
                               std::vector<at::Tensor>* guessed) {
  if (outer_ != nullptr) outer_->BeforeWriteElsewhere(t);
  if (IsInside(t)) {
    kept_.BeforeWrite(StorageOf(t));
    return;
  }
  if (frame()->writes.Contains(StorageOf(t))) return;
  if (Registry::Global().Find(t)) return;  // guessed; it would be refused
  frame()->writes.Keep(t, outer_);
  if (info.writes_are_guessed() && !info.c10d) {
    guessed->push_back(t);
  } else {
    frame()->inputs.Release(StorageOf(t));
  }
}

// The guess was right, or what was kept is given up: it was only read.
void ForwardWatch::AfterGuess(const c10::OperatorHandle& op,
                              const std::vector<at::Tensor>& guessed) {
  for (const at::Tensor& t : guessed) {
    frame()->writes.DropUnchanged(t);
    if (frame()->writes.Contains(StorageOf(t))) {
      frame()->inputs.Release(StorageOf(t));
    } else {
      NoteRead(op, t);
    }
  }
}

void ForwardWatch::NoteRead(const c10::OperatorHandle& op,
                            const at::Tensor& t) {
  const auto* const storage = StorageOf(t);
  const bool read = !IsInside(t) && !frame()->writes.Contains(storage) &&
                    !frame()->inputs.Contains(storage);
  if (read) frame()->reads.Add(t, op);
}

void ForwardWatch::BeforeWrites(const OperatorInfo& info,
                                const torch::jit::Stack& stack,
                                std::vector<at::Tensor>* guessed) {
  ForEachDefinedTensor(stack, info.writes.size(),
                       [&](const at::Tensor& t, size_t i) {
                         if (info.MayWrite(stack, i))
                           BeforeWrite(info, t, guessed);
                       });
}

void ForwardWatch::DoBegin(const c10::OperatorHandle& op,
                           const OperatorInfo& info, torch::jit::Stack* stack,
                           bool own) {
  guessed_.clear();
  kept_.Abandon();
  BeforeWrites(info, *stack, &guessed_);
  ForEachDefinedTensor(*stack, info.writes.size(),
                       [&](const at::Tensor& t, size_t) { NoteRead(op, t); });
  if (own && IsKept(frame()->options, info)) kept_.Begin(info, *stack);
}

void ForwardWatch::DoBeginMade(const c10::OperatorHandle& op,
                               const OperatorInfo& info,
                               torch::jit::Stack* stack) {
  Made& made = made_.emplace_back(Made{op, {}});
  BeforeWrites(info, *stack, &made.guessed);
}

void ForwardWatch::DoEndMade(const c10::OperatorHandle& op) {
  while (!made_.empty()) {
    const Made made = std::move(made_.back());
    made_.pop_back();
    AfterGuess(made.op, made.guessed);
    if (made.op == op) return;  // others threw
  }
}

void ForwardWatch::DoEnd(const c10::OperatorHandle& op, const OperatorInfo&,
                         torch::jit::Stack* stack) {
  AfterGuess(op, std::exchange(guessed_, {}));
  kept_.End(op, *stack, frame()->inputs.Devices());
}

std::shared_ptr<SavedSlot> ForwardWatch::Save(const at::Tensor& tensor,
                                              const at::Tensor&) {
  kept_.Save(tensor);
  return frame()->AddSlot(tensor, running());
}

// ---- again

AgainWatch::AgainWatch(Frame* frame, Frame::Again again)
    : CheckpointWatch(frame, nullptr),
      again_(std::move(again)),
      redirects_(frame->writes) {}

std::vector<at::Tensor> AgainWatch::Inputs() {
  return frame()->inputs.Get(&redirects_);
}

// They are pinned for the operator: it costs no gather.
void AgainWatch::PinParameters(const OperatorInfo& info,
                               const torch::jit::Stack& stack) {
  ForEachDefinedTensor(stack, info.writes.size(),
                       [&](const at::Tensor& t, size_t) {
                         if (!HasTag(t)) return;
                         const StorageOwner owned = Registry::Global().Find(t);
                         if (owned) frame()->pins.Add(owned.flat);
                       });
}

void AgainWatch::RedirectArguments(const OperatorInfo& info,
                                   torch::jit::Stack* stack) {
  wrote_ = false;
  if (again_.task != -1) PinParameters(info, *stack);
  ReplaceTensors(stack, info.writes.size(),
                 [&](const at::Tensor& t, size_t i) -> at::Tensor {
                   if (IsInside(t)) return {};
                   const bool writes = info.MayWrite(*stack, i);
                   wrote_ |= writes;
                   return redirects_.Of(t, writes);
                 });
}

void AgainWatch::DoBegin(const c10::OperatorHandle&, const OperatorInfo& info,
                         torch::jit::Stack* stack, bool) {
  RedirectArguments(info, stack);
}

void AgainWatch::DoEnd(const c10::OperatorHandle&, const OperatorInfo&,
                       torch::jit::Stack*) {
  if (wrote_) redirects_.NoteHistories();
}

bool AgainWatch::Replace(const c10::OperatorHandle& op,
                         const OperatorInfo& info, torch::jit::Stack* stack) {
  if (!IsKept(frame()->options, info)) return false;
  const auto& all = frame()->kept_operators;
  if (next_kept_ >= all.size()) return false;
  const KeptOperator& kept = all[next_kept_++];
  if (kept.name != info.name) {
    ThrowIfError(frame()->Error(absl::StrCat(
        "operator ", next_kept_ - 1, " of those that are kept was ", kept.name,
        " in forward and is ", info.name, " when it is run again")));
  }
  if (!kept.is_there()) return false;
  RedirectArguments(info, stack);
  std::vector<at::Tensor> arguments, results;
  ForEachDefinedTensor(
      *stack, info.writes.size(),
      [&](const at::Tensor& t, size_t) { arguments.push_back(t); });
  std::vector<c10::IValue> values;
  PinSet none;
  for (const auto& result : kept.results) {
    values.push_back(result.other);
    if (!result.role) continue;
    results.push_back(result.value->Value(nullptr, /*reader=*/"", &none));
    values.back() = InRole(results.back(), *result.role);
  }
  if (kept.drawn_to) kept.drawn_to->Restore();
  for (const auto& saved : kept.saved) {
    const auto& from = saved.result ? results : arguments;
    TORCH_CHECK(saved.index < from.size(), "operator ", info.name,
                " has fewer tensors than in forward");
    Fill(AliasOf(from[saved.index]), info.name);
  }
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (auto& value : values) stack->push_back(std::move(value));
  return true;
}

void AgainWatch::Fill(const at::Tensor& value, absl::string_view op_name) {
  const bool stops = frame()->options.stop_early;
  if (done_ && stops) return;  // the function caught what ended it
  if (!frame()->Fill(next_++, value, op_name, &again_)) return;
  done_ = true;
  if (stops) throw RunIsDone();
}

std::shared_ptr<SavedSlot> AgainWatch::Save(const at::Tensor&,
                                            const at::Tensor& alias) {
  Fill(alias, running() ? absl::string_view(running()->schema().name()) : "");
  return nullptr;
}

}  // namespace tessera
