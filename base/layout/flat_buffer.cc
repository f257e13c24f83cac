#include "base/layout/flat_buffer.h"

#include <cstring>
#include <utility>

#include "base/status.h"
#include "base/stream/stream_uses.h"
#include "base/torch/device_ledger.h"
#include "base/torch_guard.h"

namespace tessera {
namespace {

// Returns a dense view of `numel` numbers of `dtype`, from number `begin` on.
at::Tensor ViewOf(const at::Tensor& flat, at::ScalarType dtype, int64_t begin,
                  int64_t numel) {
  c10::TensorImpl* const from = flat.unsafeGetTensorImpl();
  at::Tensor view(from->shallow_copy_and_detach(
      from->version_counter(), /*allow_tensor_metadata_change=*/true));
  c10::TensorImpl* const impl = view.unsafeGetTensorImpl();
  if (dtype != flat.scalar_type()) {
    impl->set_storage_and_dtype(flat.storage(),
                                c10::scalarTypeToTypeMeta(dtype));
  }
  const int64_t stride = 1;
  impl->set_sizes_and_strides(at::IntArrayRef(numel), at::IntArrayRef(stride),
                              begin);
  return view;
}

}  // namespace

at::Tensor Slice(const at::Tensor& flat, Range range) {
  return ViewOf(flat, flat.scalar_type(), flat.storage_offset() + range.begin,
                range.numel());
}

void CopyBytes(at::Device device, char* to, const char* from, int64_t bytes) {
  if (bytes == 0) return;
  if (device.is_cpu()) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
    return;
  }
  auto source =
      TensorOver(const_cast<char*>(from), {bytes}, {1}, at::kByte, device);
  TensorOver(to, {bytes}, {1}, at::kByte, device).copy_(source);
}

absl::StatusOr<FlatBuffer> FlatBuffer::Allocate(int64_t numel,
                                                at::ScalarType dtype,
                                                at::Device device,
                                                MemoryKind kind, Fill fill) {
  FlatBuffer buffer;
  buffer.item_bytes_ = static_cast<int64_t>(c10::elementSize(dtype));
  buffer.kind_ = kind;
  const int64_t bytes = numel * buffer.item_bytes_;
  if (device.is_cpu()) {
    TESSERA_ASSIGN_OR_RETURN(buffer.cpu_,
                             AllocateCounted(bytes, kind, fill == Fill::kZero));
    buffer.data_ = static_cast<char*>(buffer.cpu_.data());
    buffer.tensor_ = TensorOver(buffer.data_, {numel}, {1}, dtype, device);
    return buffer;
  }
  // The ledger counts it first, so that the limit holds while several threads
  // allocate; `buffer` undoes that if the device has no more.
  MemoryLedger& ledger = LedgerOf(device);
  TESSERA_RETURN_IF_ERROR(buffer.Enter(&ledger, bytes));
  const absl::Status made = CatchTorch("allocate", [&] {
    const auto options = at::TensorOptions(dtype).device(device);
    buffer.tensor_ = fill == Fill::kZero ? at::zeros({numel}, options)
                                         : at::empty({numel}, options);
  });
  if (absl::IsResourceExhausted(made)) {
    return ledger.Refused(bytes, MemoryKindName(kind), made.message());
  }
  TESSERA_RETURN_IF_ERROR(made);
  buffer.data_ = static_cast<char*>(buffer.tensor_.mutable_data_ptr());
  return buffer;
}

absl::StatusOr<FlatBuffer> FlatBuffer::Over(char* data, int64_t numel,
                                            at::ScalarType dtype,
                                            std::optional<MemoryKind> counted) {
  FlatBuffer buffer;
  buffer.item_bytes_ = static_cast<int64_t>(c10::elementSize(dtype));
  if (counted.has_value()) {
    buffer.kind_ = *counted;
    TESSERA_RETURN_IF_ERROR(
        buffer.Enter(&MemoryLedger::Host(), numel * buffer.item_bytes_));
  }
  buffer.data_ = data;
  buffer.tensor_ = TensorOver(data, {numel}, {1}, dtype, at::kCPU);
  return buffer;
}

FlatBuffer FlatBuffer::Part(Range range) const {
  FlatBuffer part;
  part.item_bytes_ = item_bytes_;
  part.data_ = data(range.begin);
  part.tensor_ = View(range);
  return part;
}

absl::Status FlatBuffer::Enter(MemoryLedger* ledger, int64_t bytes) {
  TESSERA_RETURN_IF_ERROR(ledger->Claim(kind_, bytes, MemoryKindName(kind_)));
  ledger_ = ledger;
  entered_bytes_ = bytes;
  return absl::OkStatus();
}

void FlatBuffer::Reset() {
  if (ledger_ != nullptr) ledger_->Remove(kind_, entered_bytes_);
  ledger_ = nullptr;
  entered_bytes_ = 0;
  if (tensor_.defined()) KeepForCurrentStream(tensor_);
  tensor_.reset();
  cpu_ = CountedBuffer();
  data_ = nullptr;
}

FlatBuffer::~FlatBuffer() { Reset(); }

FlatBuffer::FlatBuffer(FlatBuffer&& other) noexcept {
  *this = std::move(other);
}

FlatBuffer& FlatBuffer::operator=(FlatBuffer&& other) noexcept {
  if (this == &other) return *this;
  Reset();
  tensor_ = std::move(other.tensor_);
  cpu_ = std::move(other.cpu_);
  ledger_ = std::exchange(other.ledger_, nullptr);
  entered_bytes_ = std::exchange(other.entered_bytes_, 0);
  data_ = std::exchange(other.data_, nullptr);
  item_bytes_ = other.item_bytes_;
  kind_ = other.kind_;
  return *this;
}

at::Tensor FlatBuffer::Bytes(Range range) const {
  return ViewOf(tensor_, at::kByte,
                (tensor_.storage_offset() + range.begin) * item_bytes_,
                range.numel() * item_bytes_);
}

}  // namespace tessera
