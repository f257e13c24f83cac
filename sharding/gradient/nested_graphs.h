// Finds out whether a backward may start another within itself, as reentrant
// checkpoints do.
#ifndef SHARDING_GRADIENT_NESTED_GRAPHS_H_
#define SHARDING_GRADIENT_NESTED_GRAPHS_H_

#include "ATen/core/Tensor.h"

namespace tessera {

// Returns whether the graph of `root` has a node of the user's (a
// torch::autograd::Function, a subclass of Node), whose code may do anything.
// Libtorch's own nodes start no backward. Visits nodes until it finds one.
// LOCAL.
bool GraphMayNest(const at::Tensor& root);

}  // namespace tessera
#endif  // SHARDING_GRADIENT_NESTED_GRAPHS_H_
