#include "checkpoint/safetensors.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/layout/flat_buffer.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "checkpoint/dtype_names.h"

namespace tessera {
namespace {

constexpr int64_t kPieceBytes = 1 << 20;

}  // namespace

at::ScalarType DtypeOf(const SafetensorsTensor& tensor) {
  return DtypeNamed(tensor.dtype_name);
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
