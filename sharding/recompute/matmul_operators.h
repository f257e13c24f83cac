// Operators that cost most for the bytes of their results, of matrices and
// attention: policies keep their results instead of recomputing them.
#ifndef SHARDING_RECOMPUTE_MATMUL_OPERATORS_H_
#define SHARDING_RECOMPUTE_MATMUL_OPERATORS_H_

#include "absl/strings/string_view.h"

namespace tessera {

// Returns whether it is one, by its name, "aten::mm"; false for operators that
// are made of others.
bool IsMatmulOrAttention(absl::string_view op);

}  // namespace tessera
#endif  // SHARDING_RECOMPUTE_MATMUL_OPERATORS_H_
