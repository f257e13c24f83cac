// Who sees every operator above autograd and autocast, before what is composed
// of others is taken apart. libtorch has one key there that nobody uses, and a
// key has one fallback in a program, so all who want to see are called by it.
#ifndef BASE_ABOVE_ABOVE_AUTOGRAD_H_
#define BASE_ABOVE_ABOVE_AUTOGRAD_H_

#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/core/stack.h"
#include "c10/core/DispatchKey.h"

namespace tessera {

// Operators come here whose tensors have this key, or while a thread includes
// it.
inline constexpr c10::DispatchKey kAboveKey =
    c10::DispatchKey::TESTING_ONLY_GenericWrapper;

// Returns false, with the stack as it was, for a call that is not its concern.
using AboveHandler = bool (*)(const c10::OperatorHandle& op,
                              c10::DispatchKeySet keys,
                              torch::jit::Stack* stack);

// Adds a handler, which those of higher `rank` come before. It is
// called by static initialization alone, and there are at most 4. Returns true.
bool AddAboveHandler(AboveHandler handler, int rank);

// Returns the keys of `keys` that are below.
inline c10::DispatchKeySet BelowAbove(c10::DispatchKeySet keys) {
  return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kAboveKey);
}

}  // namespace tessera
#endif  // BASE_ABOVE_ABOVE_AUTOGRAD_H_
