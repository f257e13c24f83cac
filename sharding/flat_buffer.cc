#include "sharding/flat_buffer.h"

#include <cstring>
#include <utility>

#include "base/status.h"
#include "base/torch_guard.h"

namespace tessera {

at::Tensor TensorOver(char* data, at::IntArrayRef sizes,
                      at::IntArrayRef strides, at::ScalarType dtype,
                      at::Device device) {
  return at::from_blob(
      data, sizes, strides, /*storage_offset=*/0, [](void*) {},
      at::TensorOptions(dtype).device(device), device);
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

absl::StatusOr<FlatBuffer> FlatBuffer::Allocate(int64_t bytes,
                                                at::Device device,
                                                MemoryKind kind) {
  FlatBuffer buffer;
  buffer.bytes_ = bytes;
  buffer.kind_ = kind;
  if (device.is_cpu()) {
    TESSERA_ASSIGN_OR_RETURN(buffer.cpu_,
                             AllocateCounted(bytes, kind, /*zeroed=*/true));
    buffer.data_ = static_cast<char*>(buffer.cpu_.data());
    buffer.tensor_ = TensorOver(buffer.data_, {bytes}, {1}, at::kByte, device);
    return buffer;
  }
  TESSERA_RETURN_IF_ERROR(CatchTorch("allocate", [&] {
    buffer.tensor_ =
        at::zeros({bytes}, at::TensorOptions(at::kByte).device(device));
  }));
  buffer.data_ = static_cast<char*>(buffer.tensor_.mutable_data_ptr());
  MemoryLedger::Global().Add(kind, bytes);
  return buffer;
}

void FlatBuffer::Reset() {
  if (tensor_.defined() && !tensor_.is_cpu()) {
    MemoryLedger::Global().Remove(kind_, bytes_);
  }
  tensor_.reset();
  cpu_ = CountedBuffer();
  data_ = nullptr;
  bytes_ = 0;
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
  data_ = std::exchange(other.data_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  kind_ = other.kind_;
  return *this;
}

at::Tensor FlatBuffer::View(at::ScalarType dtype, ByteRange range) const {
  const int64_t numel =
      range.bytes() / static_cast<int64_t>(c10::elementSize(dtype));
  return TensorOver(data_ + range.begin, {numel}, {1}, dtype, tensor_.device());
}

}  // namespace tessera
