// The element types of comm/reduce/reduce.h, as libtorch calls them.
#ifndef COMM_REDUCE_ELEMENT_TYPE_H_
#define COMM_REDUCE_ELEMENT_TYPE_H_

#include "absl/status/statusor.h"
#include "c10/core/ScalarType.h"
#include "comm/reduce/reduce.h"

namespace tessera {

// InvalidArgument for a type that is not summed (complex ones, float8, ...).
absl::StatusOr<ElementType> ElementTypeOf(at::ScalarType type);

// "float32"; libtorch's own word for a type that is not summed.
const char* DtypeName(at::ScalarType type);

}  // namespace tessera
#endif  // COMM_REDUCE_ELEMENT_TYPE_H_
