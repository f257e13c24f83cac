// CheckpointWatch: the watch of a region, in forward (ForwardWatch) or when it
// runs again (AgainWatch). Both track what was made in the region.
//
// With nested regions, the inner one's watch is the thread's; it passes
// operators on to the outer one, but not what autograd saves, which belongs to
// the inner one. Only the inner region decides which of its operators are kept:
// if the outer one gave it results that it has not made, it would keep other
// things of them than in forward.
//
// Threads: only the one on which it was made.
#ifndef SHARDING_RECOMPUTE_CHECKPOINTED_CHECKPOINT_WATCH_H_
#define SHARDING_RECOMPUTE_CHECKPOINTED_CHECKPOINT_WATCH_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/core/stack.h"
#include "sharding/dispatch/operator_info.h"
#include "sharding/dispatch/operator_watch.h"
#include "sharding/recompute/checkpointed/frame.h"
#include "sharding/recompute/checkpointed/kept_operators.h"
#include "sharding/recompute/checkpointed/outside.h"
#include "sharding/recompute/storage_map.h"

namespace tessera {

class CheckpointWatch : public OperatorWatch {
 public:
  bool Begin(const c10::OperatorHandle& op, const OperatorInfo& info,
             torch::jit::Stack* stack) final;
  void End(const c10::OperatorHandle& op, const OperatorInfo& info,
           torch::jit::Stack* stack) final;
  void BeginMade(const c10::OperatorHandle& op, const OperatorInfo& info,
                 torch::jit::Stack* stack) final;
  void EndMade(const c10::OperatorHandle& op) final;

 protected:
  // `outer`: the outer region's watch, which is also called; null: none.
  CheckpointWatch(Frame* frame, CheckpointWatch* outer)
      : frame_(frame), outer_(outer) {}
  // `own`: the operator belongs to this region, not to one within it.
  virtual void DoBegin(const c10::OperatorHandle& op, const OperatorInfo& info,
                       torch::jit::Stack* stack, bool own) = 0;
  virtual void DoEnd(const c10::OperatorHandle& op, const OperatorInfo& info,
                     torch::jit::Stack* stack) = 0;
  virtual void DoBeginMade(const c10::OperatorHandle& op,
                           const OperatorInfo& info,
                           torch::jit::Stack* stack) = 0;
  virtual void DoEndMade(const c10::OperatorHandle& op) {}
  Frame* frame() const { return frame_; }
  bool IsInside(const at::Tensor& tensor) const;
  void MadeInside(const at::Tensor& tensor) {
    if (tensor.has_storage()) inside_.Add(tensor.storage(), {});
  }
  // Throws if the operator declares that it writes a parameter that a flat
  // owns.
  void RefuseParameters(const OperatorInfo& info,
                        const torch::jit::Stack& stack) const;
  const std::optional<c10::OperatorHandle>& running() const { return running_; }

 private:
  bool Follow(const c10::OperatorHandle& op, const OperatorInfo& info,
              torch::jit::Stack* stack, bool own);

  Frame* const frame_;
  CheckpointWatch* const outer_;
  struct Nothing {};
  StorageMap<Nothing> inside_;  // what operators in it have made
  std::optional<c10::OperatorHandle> running_;
};

class ForwardWatch final : public CheckpointWatch {
 public:
  // `frame` lives longer; `outer` may be no CheckpointWatch.
  ForwardWatch(Frame* frame, OperatorWatch* outer);
  std::shared_ptr<SavedSlot> Save(const at::Tensor& tensor,
                                  const at::Tensor& alias) override;

 private:
  void DoBegin(const c10::OperatorHandle& op, const OperatorInfo& info,
               torch::jit::Stack* stack, bool own) override;
  void DoEnd(const c10::OperatorHandle& op, const OperatorInfo& info,
             torch::jit::Stack* stack) override;
  void DoBeginMade(const c10::OperatorHandle& op, const OperatorInfo& info,
                   torch::jit::Stack* stack) override;
  void DoEndMade(const c10::OperatorHandle& op) override;
  void BeforeWrites(const OperatorInfo& info, const torch::jit::Stack& stack,
                    std::vector<at::Tensor>* guessed);
  void BeforeWrite(const OperatorInfo& info, const at::Tensor& tensor,
                   std::vector<at::Tensor>* guessed);

  void AfterGuess(const c10::OperatorHandle& op,
                  const std::vector<at::Tensor>& guessed);
  void NoteRead(const c10::OperatorHandle& op, const at::Tensor& tensor);

  OperatorWatch* const outer_;
  KeptOperatorsBuilder kept_;
  std::vector<at::Tensor> guessed_;  // what the running operator may write
  struct Made {
    c10::OperatorHandle op;
    std::vector<at::Tensor> guessed;
  };
  std::vector<Made> made_;  // the running ones, the outermost first
};

class AgainWatch final : public CheckpointWatch {
 public:
  AgainWatch(Frame* frame, Frame::Again again);
  bool Replace(const c10::OperatorHandle& op, const OperatorInfo& info,
               torch::jit::Stack* stack) override;
  std::shared_ptr<SavedSlot> Save(const at::Tensor& tensor,
                                  const at::Tensor& alias) override;

  std::vector<at::Tensor> Inputs();
  const Frame::Again& again() const { return again_; }
  int64_t saved() const { return next_; }
  bool done() const { return done_; }

 private:
  void DoBegin(const c10::OperatorHandle& op, const OperatorInfo& info,
               torch::jit::Stack* stack, bool own) override;
  void DoEnd(const c10::OperatorHandle& op, const OperatorInfo& info,
             torch::jit::Stack* stack) override;
  void DoBeginMade(const c10::OperatorHandle&, const OperatorInfo& info,
                   torch::jit::Stack* stack) override {
    RedirectArguments(info, stack);
  }
  void PinParameters(const OperatorInfo& info, const torch::jit::Stack& stack);
  void RedirectArguments(const OperatorInfo& info, torch::jit::Stack* stack);
  void Fill(const at::Tensor& value, absl::string_view op_name);

  Frame::Again again_;
  int64_t next_ = 0;
  size_t next_kept_ = 0;
  bool done_ = false;
  bool wrote_ = false;
  Redirects redirects_;
};

}  // namespace tessera
#endif  // SHARDING_RECOMPUTE_CHECKPOINTED_CHECKPOINT_WATCH_H_
