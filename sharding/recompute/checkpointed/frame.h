// Frame: one checkpointed region between its forward and backward, and Slot: a
// tensor that autograd saved in it.
//
//   forward                     backward
//   Save --> Slot 0  (nothing)  Unpack of slot 4: runs the function again,
//            Slot 1  (nothing)    whose n-th Save fills slot n, up to the last
//            ...                  slot that is alive; then it is stopped
//   inputs, rng, autocast       Unpack of slot 1: hands its value out
//
// A value is handed out once, and only to the graph task that it was computed
// for.
//
// Threads: any; the function may run again on several at once.
#ifndef SHARDING_RECOMPUTE_CHECKPOINTED_FRAME_H_
#define SHARDING_RECOMPUTE_CHECKPOINTED_FRAME_H_

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/core/dispatch/Dispatcher.h"
#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "sharding/dispatch/backward_pins.h"
#include "sharding/dispatch/operator_watch.h"
#include "sharding/recompute/checkpointed/autocast_state.h"
#include "sharding/recompute/checkpointed/checkpoint_options.h"
#include "sharding/recompute/checkpointed/kept_inputs.h"
#include "sharding/recompute/checkpointed/kept_operators.h"
#include "sharding/recompute/checkpointed/outside.h"
#include "sharding/recompute/rng_state.h"

namespace tessera {

class AgainWatch;  // checkpoint_watch.h

class Frame;

class Slot final : public SavedSlot {
 public:
  // `op`: the operator in which `tensor` is saved, if it is known.
  Slot(std::shared_ptr<Frame> frame, int64_t number, const at::Tensor& tensor,
       const std::optional<c10::OperatorHandle>& op);
  at::Tensor Unpack() override;

  // Throws unless `tensor`, which was computed again, is as it was.
  void Check(const at::Tensor& tensor, absl::string_view op_name) const;
  int64_t number() const { return number_; }

 private:
  friend class Frame;

  std::string Name() const;  // for messages

  const std::shared_ptr<Frame> frame_;
  const int64_t number_;
  const c10::DimVector sizes_, strides_;
  const at::ScalarType dtype_;
  const at::Device device_;
  const std::optional<c10::OperatorHandle> op_;
  std::optional<uint64_t> print_;
  // Guarded by the frame's mutex.
  at::Tensor value_;
  int64_t value_version_ = 0, value_task_ = -1;
};

class Frame : public std::enable_shared_from_this<Frame> {
 public:
  using Rerun = std::function<void(std::vector<at::Tensor>)>;

  // Of forward on this thread, before it. `outer` (may be null) is told of what
  // is kept. `prints`: values are compared.
  Frame(const CheckpointOptions& options, bool prints,
        const std::vector<at::Tensor>& inputs, Rerun rerun,
        OperatorWatch* outer);

  // ---- forward
  std::shared_ptr<SavedSlot> AddSlot(
      const at::Tensor& tensor, const std::optional<c10::OperatorHandle>& op);
  void EndForward() {
    draws_ = !rng_.IsCurrent();
    forward_ended_ = true;
  }

  // ---- backward
  // Fills a slot that is alive. Throws what Slot::Check does, and if forward
  // had fewer. Whether it was the last one up to `last`.
  bool Fill(int64_t number, int64_t last, int64_t task, const at::Tensor& value,
            absl::string_view op_name);
  at::Tensor Unpack(Slot* slot);

  absl::Status Error(std::string what) const;

  const CheckpointOptions options;
  const bool prints;
  // Written in forward, read later.
  KeptInputs inputs;
  OutsideWrites writes;
  OutsideReads reads;
  std::vector<KeptOperator> kept_operators;
  // Of what the function used when it ran again, until the backward of that is
  // over: it uses the same.
  BackwardPins pins;

 private:
  void RunAgain(const Slot& slot, int64_t task);
  void Run(std::vector<at::Tensor> inputs, AgainWatch* watch);
  // Throws if it filled too little.
  void CheckSaved(const Slot& slot, const AgainWatch& watch);
  at::Tensor Take(Slot* slot, int64_t task);
  int64_t LastAlive();
  void DropAtTheEndOf(int64_t task);
  void Drop(int64_t task);

  const Rerun rerun_;
  const RngState rng_;
  const AutocastState autocast_;
  // The generators have moved in forward: where they have not they are left
  // alone, for other threads draw from them, too.
  bool draws_ = true;
  std::atomic<bool> forward_ended_{false};
  absl::Mutex mutex_;
  std::vector<std::weak_ptr<Slot>> slots_ ABSL_GUARDED_BY(mutex_);
};

// Ends a run when all that is needed is there. Thrown from Save.
class RunIsDone : public std::exception {
 public:
  const char* what() const noexcept override {
    return "a checkpointed region computes no further";
  }
};

}  // namespace tessera
#endif  // SHARDING_RECOMPUTE_CHECKPOINTED_FRAME_H_
