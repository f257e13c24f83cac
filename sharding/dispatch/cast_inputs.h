// Casts inputs that have another dtype than the parameters.
//
// Where parameters are kept in 16 bits (or some of them in 32), a module gets
// inputs that libtorch's operators refuse to combine with them. For flats that
// say so (FlatParameter::cast_inputs) the fallback casts, as PyTorch's FSDP2
// does for whole modules, but at the operator and only where it matters:
//
//   linear, convolutions, RNNs, ...   floating arguments that no flat owns
//                                     become the parameters' dtype
//   normalisations                    the same; a narrower input is computed in
//                                     the parameters' dtype and the result cast
//                                     back to the input's
//
// An operator that promotes by itself (add, mul, cat) is left alone, and so is
// one whose flats differ in dtype. Arguments that are written, and running
// statistics, are never replaced: where a normalisation has statistics, it is
// computed in their dtype. Casts are made under the user's thread-local state,
// so gradients flow through them.
#ifndef SHARDING_DISPATCH_CAST_INPUTS_H_
#define SHARDING_DISPATCH_CAST_INPUTS_H_

#include <cstddef>
#include <optional>
#include <string>

#include "ATen/core/Tensor.h"
#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/core/stack.h"

namespace tessera {

enum class InputCasts { kNone, kInputs, kNormalization };

// Returns the casts of an operator by its name, "aten::linear", for all
// overloads.
InputCasts InputCastsOf(const std::string& name);

// Returns whether a flat that casts inputs owns the tensor.
using OwnsTensor = bool (*)(const at::Tensor& tensor);
bool FlatCastsInputsOf(const at::Tensor& tensor);

// Casts the arguments on top of the stack. Returns the dtype to which the first
// result must be cast, if it must. `owned` says what counts as a parameter.
std::optional<at::ScalarType> CastInputs(const c10::OperatorHandle& op,
                                         InputCasts casts,
                                         torch::jit::Stack* stack,
                                         OwnsTensor owned = &FlatCastsInputsOf);
// Casts the first of the results on top of the stack.
void CastFirstResult(size_t num_returns, at::ScalarType dtype,
                     torch::jit::Stack* stack);

}  // namespace tessera
#endif  // SHARDING_DISPATCH_CAST_INPUTS_H_
