// The fallback behind the tag sees every operator that receives a tensor which
// aliases a flat parameter (flat, for short), pins the operator's flats, lets
// it run, and marks what it wrote. It is registered with libtorch's dispatcher
// when this library is loaded.
//
// The order within an operator is: all its flats are pinned (so that gathering
// the second cannot free the first), the operator runs, its outputs that alias
// a flat are tagged, the pins are released.
#ifndef SHARDING_DISPATCH_TAG_H_
#define SHARDING_DISPATCH_TAG_H_

#include "absl/status/status.h"

namespace tessera {

// Checks that the fallback is this library's; FailedPrecondition where another
// library has taken the dispatch key. LOCAL.
absl::Status CheckTagFallback();

}  // namespace tessera
#endif  // SHARDING_DISPATCH_TAG_H_
