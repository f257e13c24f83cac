#include "checkpoint/dtype_names.h"

namespace tessera {
namespace {

struct NamedDtype {
  absl::string_view name;
  at::ScalarType dtype;
};
constexpr NamedDtype kDtypes[] = {
    {"BOOL", at::ScalarType::Bool},
    {"U8", at::ScalarType::Byte},
    {"I8", at::ScalarType::Char},
    {"F8_E4M3", at::ScalarType::Float8_e4m3fn},
    {"F8_E5M2", at::ScalarType::Float8_e5m2},
    {"F8_E8M0", at::ScalarType::Float8_e8m0fnu},
    {"F8_E4M3FNUZ", at::ScalarType::Float8_e4m3fnuz},
    {"F8_E5M2FNUZ", at::ScalarType::Float8_e5m2fnuz},
    {"I16", at::ScalarType::Short},
    {"U16", at::ScalarType::UInt16},
    {"F16", at::ScalarType::Half},
    {"BF16", at::ScalarType::BFloat16},
    {"I32", at::ScalarType::Int},
    {"U32", at::ScalarType::UInt32},
    {"F32", at::ScalarType::Float},
    {"I64", at::ScalarType::Long},
    {"U64", at::ScalarType::UInt64},
    {"F64", at::ScalarType::Double},
    {"C64", at::ScalarType::ComplexFloat},
};

}  // namespace

std::string NameOfDtype(at::ScalarType dtype) {
  for (const NamedDtype& each : kDtypes) {
    if (each.dtype == dtype) return std::string(each.name);
  }
  return "";
}

at::ScalarType DtypeNamed(absl::string_view name) {
  for (const NamedDtype& each : kDtypes) {
    if (each.name == name) return each.dtype;
  }
  return at::ScalarType::Undefined;
}

}  // namespace tessera
