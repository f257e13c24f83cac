// OperatorWatch: follows a thread's operators and what autograd saves in them,
// in order to recompute it instead of keeping it (sharding/recompute).
//
//   operator --> fallback (tag.h) --> Begin, the operator, End
//   autograd saves a tensor --> saved_tensors.cc --> Save
//
// With FollowAll, which puts the tag's key in the thread's state, the fallback
// also sees operators without a parameter.
//
// Threads: a watch is used on its thread only; a SavedSlot on any.
#ifndef SHARDING_DISPATCH_OPERATOR_WATCH_H_
#define SHARDING_DISPATCH_OPERATOR_WATCH_H_

#include <cstdint>
#include <memory>

#include "ATen/core/Tensor.h"
#include "ATen/core/stack.h"
#include "sharding/flat/registry.h"

namespace c10 {
class OperatorHandle;
}

namespace tessera {

struct OperatorInfo;

// What autograd keeps instead of a tensor.
class SavedSlot {
 public:
  virtual ~SavedSlot() = default;
  // Returns a tensor of the saved one's values, sizes, strides and dtype,
  // without history. May throw; may be called more than once.
  virtual at::Tensor Unpack() = 0;
};

class OperatorWatch {
 public:
  virtual ~OperatorWatch() = default;

  // Returns this thread's watch; null: none.
  static OperatorWatch* Current();

  // Called before Begin, with its arguments. True: the operator is not run, its
  // results are on top of `stack` in place of its arguments, and neither Begin
  // nor End is called.
  virtual bool Replace(const c10::OperatorHandle& op, const OperatorInfo& info,
                       torch::jit::Stack* stack) {
    return false;
  }

  // Called before an operator runs with the arguments on top of `stack`, if it
  // computes (OperatorInfo::Kind::kCompute), is not made of others and is not
  // taken by autocast (whose operators are seen themselves). What it needs is
  // pinned. May throw. False: neither it nor what runs within is followed.
  // True: End is called, or Failed if the operator throws.
  virtual bool Begin(const c10::OperatorHandle& op, const OperatorInfo& info,
                     torch::jit::Stack* stack) = 0;
  // Called after the operator, with its results on top of `stack`.
  virtual void End(const c10::OperatorHandle& op, const OperatorInfo& info,
                   torch::jit::Stack* stack) = 0;
  virtual void Failed() {}
  // Called before an operator writes to `tensor` that this watch does not see,
  // since another watch follows it.
  virtual void BeforeWriteElsewhere(const at::Tensor& tensor) {}

  // Called before an operator of the user's that is made of others, which are
  // seen themselves: it may also write through a pointer. EndMade is called
  // unless it throws.
  virtual void BeginMade(const c10::OperatorHandle& op,
                         const OperatorInfo& info, torch::jit::Stack* stack) {}
  virtual void EndMade(const c10::OperatorHandle& op) {}

  // Called when autograd saves `tensor`, which is neither owned by a flat nor a
  // cast of an owned one. `alias` shares its memory and version counter,
  // without history. Null: autograd keeps the tensor.
  virtual std::shared_ptr<SavedSlot> Save(const at::Tensor& tensor,
                                          const at::Tensor& alias) = 0;

  // Whether a followed operator is running: operators within it are not seen
  // (what autograd saves is).
  bool within() const { return within_; }
  class Within {
   public:
    explicit Within(OperatorWatch* watch) : watch_(watch) {
      watch->within_ = true;
    }
    ~Within() { watch_->within_ = false; }
    Within(const Within&) = delete;
    Within& operator=(const Within&) = delete;

   private:
    OperatorWatch* const watch_;
  };

  // Whether an operator that is made of others is running.
  bool in_composite() const { return composites_ > 0; }
  class Composite {
   public:
    explicit Composite(OperatorWatch* watch) : watch_(watch) {
      ++watch->composites_;
    }
    ~Composite() { --watch_->composites_; }
    Composite(const Composite&) = delete;
    Composite& operator=(const Composite&) = delete;

   private:
    OperatorWatch* const watch_;
  };

 private:
  bool within_ = false;
  int composites_ = 0;
};

// Makes `watch` the thread's while it lives (null: none).
class WatchScope {
 public:
  explicit WatchScope(OperatorWatch* watch);
  ~WatchScope();
  WatchScope(const WatchScope&) = delete;
  WatchScope& operator=(const WatchScope&) = delete;

 private:
  OperatorWatch* const before_;
};

// Sets the thread's watch until the next call, for callers that cannot hold a
// scope.
void SetWatch(OperatorWatch* watch);

// Marks, while it lives, that this thread recomputes what a forward has
// computed.
class ReplayMark {
 public:
  ReplayMark();
  ~ReplayMark();
  ReplayMark(const ReplayMark&) = delete;
  ReplayMark& operator=(const ReplayMark&) = delete;
  static bool IsSet();

 private:
  const bool before_;
};

// Marks, while it lives, that tensors of this thread have sizes but no values:
// a trace (sharding/trace).
class NoValues {
 public:
  NoValues();
  ~NoValues();
  NoValues(const NoValues&) = delete;
  NoValues& operator=(const NoValues&) = delete;
  static bool IsSet();

 private:
  const bool before_;
};

// Sets whether the fallback sees all operators of this thread, from now on.
void FollowAll(bool all);
bool FollowsAll();
// Makes the fallback see all operators of this thread while it lives.
class FollowScope {
 public:
  FollowScope() : before_(FollowsAll()) { FollowAll(true); }
  ~FollowScope() { FollowAll(before_); }
  FollowScope(const FollowScope&) = delete;
  FollowScope& operator=(const FollowScope&) = delete;

 private:
  const bool before_;
};

// ParameterUses: called for each parameter that an operator is about to use, on
// the operator's thread, before it is pinned and before Begin; the call may set
// another watch.
class ParameterUses {
 public:
  virtual ~ParameterUses() = default;
  virtual void Used(const StorageOwner& owned) = 0;
};
// Sets the process-wide object, for good; null at first. Do not call it while
// operators run.
void SetParameterUses(ParameterUses* uses);
ParameterUses* CurrentParameterUses();

}  // namespace tessera
#endif  // SHARDING_DISPATCH_OPERATOR_WATCH_H_
