// OperatorWatch: who follows a thread's operators and what autograd saves of
// them, in order to compute it again instead of keeping it
// (sharding/recompute).
//
//   operator --> fallback (tag.h) --> Begin, the operator, End
//   autograd saves a tensor --> saved_tensors.cc --> Save
//
// The fallback sees operators without a parameter, too, where the tag's key is
// in the thread's state: FollowAll.
//
// Threads: a watch is its thread's; a SavedSlot is any thread's.
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
  // The tensor, of the same sizes, strides and dtype, without history. May
  // throw; may be called more than once.
  virtual at::Tensor Unpack() = 0;
};

class OperatorWatch {
 public:
  virtual ~OperatorWatch() = default;

  // The thread's; null: none.
  static OperatorWatch* Current();

  // As Begin, and before it. True: the operator is not run, its results are on
  // top of `stack` in place of its arguments, and neither Begin nor End comes.
  virtual bool Replace(const c10::OperatorHandle& op, const OperatorInfo& info,
                       torch::jit::Stack* stack) {
    return false;
  }

  // An operator is about to run with the arguments on top of `stack`: one that
  // computes (OperatorInfo::Kind::kCompute) and is not made of others, nor
  // autocast's to take, which would be seen by themselves. What it needs is
  // pinned. May throw. False: it is not followed, nor what runs within. True:
  // End comes, or Failed if the operator throws.
  virtual bool Begin(const c10::OperatorHandle& op, const OperatorInfo& info,
                     torch::jit::Stack* stack) = 0;
  // Its results are on top of `stack`.
  virtual void End(const c10::OperatorHandle& op, const OperatorInfo& info,
                   torch::jit::Stack* stack) = 0;
  virtual void Failed() {}
  // An operator that this watch does not see, since another follows it, is
  // about to write to `tensor`.
  virtual void BeforeWriteElsewhere(const at::Tensor& tensor) {}

  // The same of an operator of the user's that is made of others, which are
  // seen by themselves: it may write by a pointer, too. EndMade comes unless it
  // throws.
  virtual void BeginMade(const c10::OperatorHandle& op,
                         const OperatorInfo& info, torch::jit::Stack* stack) {}
  virtual void EndMade(const c10::OperatorHandle& op) {}

  // Autograd saves `tensor`, which no flat owns and which is no cast of what
  // one owns. `alias` shares its memory and version counter, without history.
  // Null: it is kept.
  virtual std::shared_ptr<SavedSlot> Save(const at::Tensor& tensor,
                                          const at::Tensor& alias) = 0;

  // A followed operator is running: those within are not seen. (What autograd
  // saves is.)
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

  // One that is made of others is running.
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

// For its life, `watch` is the thread's (null: none).
class WatchScope {
 public:
  explicit WatchScope(OperatorWatch* watch);
  ~WatchScope();
  WatchScope(const WatchScope&) = delete;
  WatchScope& operator=(const WatchScope&) = delete;

 private:
  OperatorWatch* const before_;
};

// Sets the thread's watch until the next call, for who cannot hold a scope.
void SetWatch(OperatorWatch* watch);

// For its life, this thread computes again what a forward has computed.
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

// For its life, tensors of this thread have sizes and no values: a trace
// (sharding/trace). Nobody looks at them.
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

// Whether the fallback sees all operators of this thread, from now on.
void FollowAll(bool all);
bool FollowsAll();
// It does, for its life.
class FollowScope {
 public:
  FollowScope() : before_(FollowsAll()) { FollowAll(true); }
  ~FollowScope() { FollowAll(before_); }
  FollowScope(const FollowScope&) = delete;
  FollowScope& operator=(const FollowScope&) = delete;

 private:
  const bool before_;
};

// Told of each parameter that an operator is about to use, on the operator's
// thread, before it is pinned and before Begin: this may set another watch.
class ParameterUses {
 public:
  virtual ~ParameterUses() = default;
  virtual void Used(const StorageOwner& owned) = 0;
};
// Process-wide, for good; null at first. Not while operators run.
void SetParameterUses(ParameterUses* uses);
ParameterUses* CurrentParameterUses();

}  // namespace tessera
#endif  // SHARDING_DISPATCH_OPERATOR_WATCH_H_
