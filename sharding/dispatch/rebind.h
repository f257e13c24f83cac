// Operators that would replace a parameter's storage (torch::load, Module::to,
// set_data, vector_to_parameters) and so detach it from its flat: a compatible
// one becomes a write of its values, another is refused by name. Both arrive at
// the fallback before the change.
#ifndef SHARDING_DISPATCH_REBIND_H_
#define SHARDING_DISPATCH_REBIND_H_

#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/core/stack.h"

namespace tessera {

// aten::set_ on a tensor that a flat owns: copies the source's values in,
// leaves the result on the stack and returns true. False: the first argument is
// no flat's, the operator is to run. Throws StatusException (InvalidArgument,
// naming the parameter) if sizes, dtype or device differ.
bool SetBecomesWrite(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// aten::_has_compatible_shallow_copy_type(self, from), which set_data asks: if
// a flat owns `self`, copies from's values in and makes `from` alias the
// parameter, so that the set_data which follows changes nothing. Throws as
// above.
void SetDataBecomesWrite(torch::jit::Stack* stack);

}  // namespace tessera
#endif  // SHARDING_DISPATCH_REBIND_H_
