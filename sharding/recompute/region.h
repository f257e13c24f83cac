// Region: a part of a forward that is recomputed by a tape of its operators,
// and what autograd saved in it.
//
//   open      operators go on the tape; what autograd saves is held
//   closed    of what it saved, what the tape makes is given up (unless it is
//             to be kept), the rest stays
//   backward  the first unpack of what was given up runs the tape, for all of
//             it (recomputed_part.h)
//
// Threads: the forward runs on one, unpacking on any.
#ifndef SHARDING_RECOMPUTE_REGION_H_
#define SHARDING_RECOMPUTE_REGION_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "offload/activation_store.h"
#include "sharding/dispatch/operator_info.h"
#include "sharding/recompute/outside_tensor.h"
#include "sharding/recompute/recomputed_part.h"
#include "sharding/recompute/tape.h"

namespace tessera {

class Region final : public RecomputedPart {
 public:
  // Whether an operator's results are held and not recomputed.
  using Keeps = std::function<bool(absl::string_view op)>;
  struct Options {
    Keeps keeps;  // null: nothing is
    // Where tensors that are not given up are moved in the meantime; null: they
    // stay.
    std::shared_ptr<ActivationStore> store;
    // False: nothing is recomputed.
    bool records = true;
    // It is told when the region recomputes; null: nobody is.
    std::shared_ptr<ComputedParts> computed;
  };
  // `outside` is the thread's, until the region is closed.
  Region(const std::string& name, Options options, OutsideTensors* outside);
  ~Region() override;

  // These are called as OperatorWatch's methods of the same names.
  bool Begin(const c10::OperatorHandle& op, const OperatorInfo& info,
             const torch::jit::Stack& stack);
  void End(const c10::OperatorHandle& op, const OperatorInfo& info,
           const torch::jit::Stack& stack);
  void Failed() { tape_.Failed(); }
  // Notes that an operator which is not on the tape writes to `tensor`.
  void WrittenElsewhere(const at::Tensor& tensor) {
    if (tape_.MemoryOf(tensor) < 0) return;
    tape_.Spoil("a tensor of it is written within tessera::Checkpointed");
  }
  // Whether autograd has saved something in it.
  bool saved() const { return saved_; }
  // Marks that it cannot be recomputed, because of `why`.
  void Spoil(std::string why) { tape_.Spoil(std::move(why)); }
  std::shared_ptr<SavedSlot> Save(const at::Tensor& tensor,
                                  const at::Tensor& alias);

  // ---- The end of its forward: Prepare, perhaps Verify, then GiveUp or
  // KeepAll.

  // Returns the bytes that could be given up; 0: none, or the tape is spoilt.
  // The memories `other` (of Verify of an equal tape) are held.
  int64_t Prepare(absl::Span<const int> other = {});
  const std::string& spoilt() const { return tape_.spoilt(); }
  uint64_t signature() const { return tape_.signature(); }
  // Runs the tape and compares the results with what is still held. Returns the
  // memories that have other bits and can be held: of an operator that made
  // other floating-point numbers all, else only those (a seed that nobody set).
  // DataLoss names a memory that cannot be held, since it is written again.
  // COLLECTIVE as Tape::Replay.
  absl::StatusOr<std::vector<int>> Verify();
  // Holds these memories as well; returns the bytes that are not given up then.
  // `told`: their operators and bytes, for messages.
  int64_t Hold(absl::Span<const int> other, std::string* told);
  void GiveUp();
  // Moves what was not given up to the store, after GiveUp. May throw.
  void MoveHeld();
  // `token` lives as long as what is kept.
  void KeepAll(const std::shared_ptr<void>& token);

  // Replace all these where nothing is recomputed: SavedBytes returns the bytes
  // that autograd has saved, MoveSaved moves them to the store. May throw.
  int64_t SavedBytes() const;
  void MoveSaved();

  int num_operators() const { return static_cast<int>(tape_.size()); }

 private:
  class Saved;
  const Saved* FindOther(int memory, const c10::Storage& made) const;
  Value Compute(Slot* slot, int64_t task) override;
  void Move(Saved* saved, ActivationStore::Group* group);
  void Fetch(Saved* saved, int64_t task) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Restore(int64_t task) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Tape tape_;
  const Options options_;
  OutsideTensors* const outside_;
  bool saved_ = false;
  // The slots of all that autograd saved, until Prepare.
  std::vector<std::weak_ptr<Saved>> saved_slots_;
  // After Prepare: the slots that can be given up, in the tape's order; and the
  // others.
  std::vector<std::weak_ptr<Saved>> given_up_, held_;
  absl::Mutex mutex_;  // what slots hold; one computes at a time
};

}  // namespace tessera
#endif  // SHARDING_RECOMPUTE_REGION_H_
