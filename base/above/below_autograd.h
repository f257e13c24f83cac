// Who runs a thread's operators in place of their kernels, below autograd: the
// graph, and what it saves, are libtorch's own. A key has one fallback in a
// program, so all who want that are called by it.
#ifndef BASE_ABOVE_BELOW_AUTOGRAD_H_
#define BASE_ABOVE_BELOW_AUTOGRAD_H_

#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/core/stack.h"
#include "c10/core/DispatchKey.h"
#include "c10/core/DispatchKeySet.h"
#include "c10/core/impl/LocalDispatchKeySet.h"

namespace tessera {

inline constexpr c10::DispatchKey kBelowKey = c10::DispatchKey::Fake;

// BelowAutograd: runs the operators of a thread.
//
// Threads: each is its thread's; backward of CPU tensors runs on the thread
// that calls it, with its keys.
class BelowAutograd {
 public:
  virtual ~BelowAutograd() = default;

  // Runs an operator: its arguments on top of `stack` become its results.
  virtual void RunBelow(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                        torch::jit::Stack* stack) = 0;

  // Returns this thread's; null: there is none.
  static BelowAutograd* Current();

  // Makes `runner` this thread's while it lives. REQUIRES: it has none.
  class Scope {
   public:
    explicit Scope(BelowAutograd* runner);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    c10::impl::IncludeDispatchKeyGuard seen_;
  };
};

// Returns the keys of `keys` that are below.
inline c10::DispatchKeySet BelowBelow(c10::DispatchKeySet keys) {
  return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kBelowKey);
}

}  // namespace tessera
#endif  // BASE_ABOVE_BELOW_AUTOGRAD_H_
