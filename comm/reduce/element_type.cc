#include "comm/reduce/element_type.h"

#include "absl/strings/str_cat.h"

namespace tessera {

absl::StatusOr<shm::ElementType> ElementTypeOf(at::ScalarType type) {
  switch (type) {
    case at::kBool:
      return shm::ElementType::kBool;
    case at::kByte:
      return shm::ElementType::kUInt8;
    case at::kChar:
      return shm::ElementType::kInt8;
    case at::kShort:
      return shm::ElementType::kInt16;
    case at::kInt:
      return shm::ElementType::kInt32;
    case at::kLong:
      return shm::ElementType::kInt64;
    case at::kHalf:
      return shm::ElementType::kFloat16;
    case at::kBFloat16:
      return shm::ElementType::kBFloat16;
    case at::kFloat:
      return shm::ElementType::kFloat32;
    case at::kDouble:
      return shm::ElementType::kFloat64;
    default:
      return absl::InvalidArgumentError(absl::StrCat(
          "sums of ranks: expected a real type, got ", c10::toString(type)));
  }
}

const char* DtypeName(at::ScalarType type) {
  const absl::StatusOr<shm::ElementType> element = ElementTypeOf(type);
  return element.ok() ? shm::ElementTypeName(*element) : c10::toString(type);
}

}  // namespace tessera
