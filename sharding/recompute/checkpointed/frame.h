// Frame: one checkpointed region between its forward and backward.
//
//   forward                     backward
//   Save --> slot 0  (nothing)  Unpack of slot 4: runs the function again,
//            slot 1  (nothing)    whose n-th Save fills slot n, up to the last
//            ...                  slot that is alive; then it is stopped
//   inputs, rng, autocast       Unpack of slot 1: hands its value out
//                               (sharding/recompute/recomputed_part.h)
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
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "sharding/dispatch/backward_pins.h"
#include "sharding/dispatch/operator_watch.h"
#include "sharding/recompute/checkpointed/autocast_state.h"
#include "sharding/recompute/checkpointed/checkpoint_options.h"
#include "sharding/recompute/checkpointed/kept_inputs.h"
#include "sharding/recompute/checkpointed/kept_operators.h"
#include "sharding/recompute/checkpointed/outside.h"
#include "sharding/recompute/generator_state.h"
#include "sharding/recompute/recomputed_part.h"

namespace tessera {

class AgainWatch;  // checkpoint_watch.h

class Frame final : public RecomputedPart {
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
    draws_ = !generators_.AreCurrent();
    forward_ended_ = true;
  }

  // ---- backward, by AgainWatch
  // One run of the function again.
  struct Again {
    int64_t asked;  // slot, of which `value` becomes the value
    int64_t last;   // slot that is alive
    int64_t task;
    Value value;
  };
  // Fills a slot that is alive. Throws unless `tensor` is as it was in forward,
  // and if that had fewer slots. Whether it was the last one.
  bool Fill(int64_t number, const at::Tensor& tensor, absl::string_view op_name,
            Again* again);

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
  class Saved;
  Value Compute(Slot* slot, int64_t task) override;
  void TaskIsOver() override { pins.Release(); }
  void Run(std::vector<at::Tensor> inputs, AgainWatch* watch);
  // Throws if the run filled too little.
  void CheckSaved(const AgainWatch& watch, int64_t asked);

  const Rerun rerun_;
  const GeneratorStates generators_;
  const AutocastState autocast_;
  // The generators have moved in forward: where they have not they are left
  // alone, for other threads draw from them, too.
  bool draws_ = true;
  std::atomic<bool> forward_ended_{false};
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
