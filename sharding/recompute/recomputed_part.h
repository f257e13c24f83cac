// RecomputedPart: a part of a forward for which backward recomputes what
// autograd has saved: by a tape of its operators (region.h), or by calling its
// function again (checkpointed/frame.h).
//
//   Unpack of a slot   its value, if that is there, which is then autograd's;
//                      else Compute makes it, and those of the other slots
//                      that are alive
//
// A value is handed out once, and only to the graph task that it was computed
// for: what a backward leaves behind would be held until the graph is gone, and
// one that runs beside it would take what the other waits for. What a task has
// not asked for goes at its end.
//
// Threads: any.
#ifndef SHARDING_RECOMPUTE_RECOMPUTED_PART_H_
#define SHARDING_RECOMPUTE_RECOMPUTED_PART_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "base/torch/saved_version.h"
#include "sharding/dispatch/operator_watch.h"

namespace tessera {

class RecomputedPart : public std::enable_shared_from_this<RecomputedPart> {
 public:
  // A value, and its version when it was computed: without the part autograd
  // would fail where something that it saved was written afterwards.
  struct Value {
    Value() = default;
    explicit Value(at::Tensor computed)
        : version(computed), tensor(std::move(computed)) {}
    SavedVersion version;
    at::Tensor tensor;
  };

  // Slot: what autograd keeps instead of a tensor.
  class Slot : public SavedSlot {
   public:
    explicit Slot(std::shared_ptr<RecomputedPart> part)
        : part_(std::move(part)) {}
    at::Tensor Unpack() override { return part_->Unpack(this); }

   private:
    friend class RecomputedPart;
    const std::shared_ptr<RecomputedPart> part_;
    Value value_;  // by the part's mutex, as
    int64_t task_ = -1;
  };

  // `name`: for messages.
  explicit RecomputedPart(std::string name) : name_(std::move(name)) {}
  virtual ~RecomputedPart() = default;
  RecomputedPart(const RecomputedPart&) = delete;
  RecomputedPart& operator=(const RecomputedPart&) = delete;

  const std::string& name() const { return name_; }
  // Drops all values that wait for autograd. A graph task that fails drops
  // none: libtorch does not call what is queued for its end.
  void DropValues() { Drop(std::nullopt); }

 protected:
  // Computes the value of `slot` for graph task `task` (-1: none runs), and
  // Fills others. May throw.
  virtual Value Compute(Slot* slot, int64_t task) = 0;
  // Called when a task that has computed is over.
  virtual void TaskIsOver() {}

  void Add(const std::shared_ptr<Slot>& slot);
  // Returns the slot that was added with this number, while autograd has it;
  // else null.
  std::shared_ptr<Slot> SlotOf(size_t number);
  size_t num_slots();
  // Returns the number of the last slot that autograd has; -1: none.
  int64_t LastAlive();
  void Fill(Slot* slot, at::Tensor tensor, int64_t task);
  bool IsFilled(Slot* slot, int64_t task);
  // Takes the value of `slot`; undefined where there is none for `task`.
  Value Take(Slot* slot, int64_t task);

 private:
  at::Tensor Unpack(Slot* slot);
  void EndTask(int64_t task);
  // The values of one graph task, or of all.
  void Drop(std::optional<int64_t> task);

  const std::string name_;
  absl::Mutex values_mutex_;
  std::vector<std::weak_ptr<Slot>> slots_ ABSL_GUARDED_BY(values_mutex_);
  int64_t ends_with_ ABSL_GUARDED_BY(values_mutex_) =
      -1;  // task that calls EndTask
};

// The parts that have computed values since the last DropValues. Any thread.
class ComputedParts {
 public:
  void Add(std::weak_ptr<RecomputedPart> part);
  void DropValues();

 private:
  absl::Mutex mutex_;
  std::vector<std::weak_ptr<RecomputedPart>> parts_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tessera
#endif  // SHARDING_RECOMPUTE_RECOMPUTED_PART_H_
