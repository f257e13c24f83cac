#include "comm/reduce/element_type.h"

#include "absl/strings/str_cat.h"

namespace tessera {

absl::StatusOr<ElementType> ElementTypeOf(at::ScalarType type) {
  switch (type) {
    case at::kBool:
      return ElementType::kBool;
    case at::kByte:
      return ElementType::kUInt8;
    case at::kChar:
      return ElementType::kInt8;
    case at::kShort:
      return ElementType::kInt16;
    case at::kInt:
      return ElementType::kInt32;
    case at::kLong:
      return ElementType::kInt64;
    case at::kHalf:
      return ElementType::kFloat16;
    case at::kBFloat16:
      return ElementType::kBFloat16;
    case at::kFloat:
      return ElementType::kFloat32;
    case at::kDouble:
      return ElementType::kFloat64;
    default:
      return absl::InvalidArgumentError(absl::StrCat(
          "sums of ranks: expected a real type, got ", c10::toString(type)));
  }
}

const char* DtypeName(at::ScalarType type) {
  const absl::StatusOr<ElementType> element = ElementTypeOf(type);
  return element.ok() ? ElementTypeName(*element) : c10::toString(type);
}

}  // namespace tessera
