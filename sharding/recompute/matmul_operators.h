// Operators that cost most for the bytes of their results: of matrices and
// attention. What policies keep instead of computing it again.
#ifndef SHARDING_RECOMPUTE_MATMUL_OPERATORS_H_
#define SHARDING_RECOMPUTE_MATMUL_OPERATORS_H_

#include "absl/strings/string_view.h"

namespace tessera {

// By an operator's name, "aten::mm". Not of those that are made of others.
bool IsMatmulOrAttention(absl::string_view op);

}  // namespace tessera
#endif  // SHARDING_RECOMPUTE_MATMUL_OPERATORS_H_
