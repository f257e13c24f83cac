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

  // Made before the forward, on its thread. `outer` (may be null) is called for
  // what is kept. `prints`: values are compared.
  Frame(const CheckpointOptions& options, bool prints,
        const std::vector<at::Tensor>& inputs, Rerun rerun,
        OperatorWatch* outer);

  // ---- Forward.
  std::shared_ptr<SavedSlot> AddSlot(
      const at::Tensor& tensor, const std::optional<c10::OperatorHandle>& op);
  void EndForward() {
    draws_ = !generators_.AreCurrent();
    forward_ended_ = true;
  }

  // ---- Backward, called by AgainWatch. One run of the function again.
  struct Again {
    int64_t asked;  // slot, of which `value` becomes the value
    int64_t last;   // slot that is alive
    int64_t task;
    Value value;
  };
  // Fills a slot that is alive; returns whether it was the last one. Throws if
  // `tensor` differs from forward's, or if forward had fewer slots.
  bool Fill(int64_t number, const at::Tensor& tensor, absl::string_view op_name,
            Again* again);

  absl::Status Error(std::string what) const;

  const CheckpointOptions options;
  const bool prints;
  // These are written in forward and read later.
  KeptInputs inputs;
  OutsideWrites writes;
  OutsideReads reads;
  std::vector<KeptOperator> kept_operators;
  // Pins of the parameters that the function used when it ran again, until the
  // backward of that is over, which uses the same.
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
  // Forward has drawn from the generators. Where it has not they are left
  // alone, since other threads draw from them, too.
  bool draws_ = true;
  std::atomic<bool> forward_ended_{false};
};

// RunIsDone: thrown from Save, ends a run when all that is needed is there.
class RunIsDone : public std::exception {
 public:
  const char* what() const noexcept override {
    return "a checkpointed region computes no further";
  }
};

}  // namespace tessera
#endif  // SHARDING_RECOMPUTE_CHECKPOINTED_FRAME_H_
