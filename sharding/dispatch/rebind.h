// Operators that would replace a parameter's storage (torch::load, Module::to,
// set_data, vector_to_parameters) and so detach it from its flat: a compatible
// replacement becomes a write of its values, another is an error that names the
// parameter. Both reach the fallback before the change.
#ifndef SHARDING_DISPATCH_REBIND_H_
#define SHARDING_DISPATCH_REBIND_H_

#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/core/stack.h"

namespace tessera {

// Handles aten::set_ on a tensor that a flat owns: copies the source's values
// in, leaves the result on the stack and returns true. False: no flat owns the
// first argument, so the operator must run. Throws StatusException
// (InvalidArgument, naming the parameter) if sizes, dtype or device differ.
bool SetBecomesWrite(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Handles aten::_has_compatible_shallow_copy_type(self, from), which set_data
// calls: if a flat owns `self`, copies from's values in and makes `from` alias
// the parameter, so that the following set_data changes nothing. Throws as
// SetBecomesWrite.
void SetDataBecomesWrite(torch::jit::Stack* stack);

}  // namespace tessera
#endif  // SHARDING_DISPATCH_REBIND_H_
