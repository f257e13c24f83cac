#include "checkpoint/safetensors.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"
#include "sharding/layout/flat_buffer.h"
#include "sharding/torch/torch_scope.h"

namespace tessera {
namespace {

constexpr int64_t kPieceBytes = 1 << 20;

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

at::ScalarType DtypeOf(const SafetensorsTensor& tensor) {
  for (const NamedDtype& each : kDtypes) {
    if (each.name == tensor.dtype_name) return each.dtype;
  }
  return at::ScalarType::Undefined;
}

std::string SafetensorsDtypeName(at::ScalarType dtype) {
  for (const NamedDtype& each : kDtypes) {
    if (each.dtype == dtype) return std::string(each.name);
  }
  return "";
}

absl::StatusOr<std::unique_ptr<Safetensors>> Safetensors::Open(
    const std::string& path) {
  TESSERA_ASSIGN_OR_RETURN(std::unique_ptr<SafetensorsFiles> files,
                           SafetensorsFiles::Open(path));
  return std::unique_ptr<Safetensors>(new Safetensors(std::move(files)));
}

absl::Status Safetensors::Read(const SafetensorsTensor& tensor, Range elements,
                               const at::Tensor& out) const {
  if (DtypeOf(tensor) == at::ScalarType::Undefined) {
    return absl::UnimplementedError(absl::StrCat(Describe(tensor), ": dtype ",
                                                 tensor.dtype_name,
                                                 " is none that libtorch has"));
  }
  const at::ScalarType dtype = ElementType(DtypeOf(tensor));
  const auto item = static_cast<int64_t>(c10::elementSize(dtype));
  TESSERA_CHECK(elements.begin >= 0 && elements.begin <= elements.end &&
                elements.end * item <= tensor.bytes)
      << Describe(tensor) << " " << elements.begin << ".." << elements.end;
  TESSERA_CHECK(out.dim() == 1 && out.numel() == elements.numel() &&
                out.is_contiguous());
  TorchScope scope;
  const bool in_place = out.is_cpu() && out.scalar_type() == dtype;
  std::unique_ptr<char[]> piece;
  if (!in_place) piece.reset(new char[kPieceBytes]);
  const int64_t step = kPieceBytes / item;
  for (int64_t at = 0; at < elements.numel(); at += step) {
    const int64_t n = std::min(step, elements.numel() - at);
    char* const to =
        in_place ? static_cast<char*>(out.mutable_data_ptr()) + at * item
                 : piece.get();
    TESSERA_RETURN_IF_ERROR(
        files_->ReadBytes(tensor, (elements.begin + at) * item, to, n * item));
    bytes_read_ += n * item;
    if (!in_place) {
      Slice(out, {at, at + n}).copy_(TensorOver(to, {n}, {1}, dtype, at::kCPU));
    }
  }
  return absl::OkStatus();
}

}  // namespace tessera
