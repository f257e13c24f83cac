#include "offload/tiered_buffer.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/memory/memory.h"
#include "base/status.h"

namespace tessera {

absl::StatusOr<TieredBuffer> TieredBuffer::Allocate(
    int64_t numel, at::ScalarType dtype, at::Device device, MemoryKind kind,
    std::shared_ptr<SwapFile> disk, std::string what) {
  TieredBuffer buffer;
  if (disk == nullptr) {
    TESSERA_ASSIGN_OR_RETURN(buffer.memory_,
                             FlatBuffer::Allocate(numel, dtype, device, kind));
  } else {
    TESSERA_CHECK(device.is_cpu()) << what << " of " << device.str();
    const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
    auto extent = disk->Allocate(bytes);
    TESSERA_RETURN_IF_ERROR(Annotate(extent.status(), what));
    buffer.extent_ = *extent;
    buffer.disk_ = std::move(disk);
    buffer.zeros_ = true;
  }
  buffer.what_ = std::move(what);
  buffer.numel_ = numel;
  buffer.dtype_ = dtype;
  buffer.device_ = device;
  buffer.kind_ = kind;
  return buffer;
}

TieredBuffer::TieredBuffer(TieredBuffer&& other) noexcept {
  *this = std::move(other);
}

TieredBuffer& TieredBuffer::operator=(TieredBuffer&& other) noexcept {
  if (this == &other) return *this;
  Reset();
  disk_ = std::move(other.disk_);
  extent_ = other.extent_;
  what_ = std::move(other.what_);
  zeros_ = other.zeros_;
  storing_ = std::move(other.storing_);
  memory_ = std::move(other.memory_);
  numel_ = std::exchange(other.numel_, -1);
  dtype_ = other.dtype_;
  device_ = other.device_;
  kind_ = other.kind_;
  return *this;
}

void TieredBuffer::Reset() {
  if (disk_ != nullptr) {
    (void)storing_.Wait();
    disk_->Free(extent_);
  }
  disk_ = nullptr;
  memory_.Reset();
  numel_ = -1;
}

FlatBuffer TieredBuffer::TakeMemory() {
  FlatBuffer memory = std::move(memory_);
  Reset();
  return memory;
}

absl::Status TieredBuffer::Raise() {
  if (in_memory()) return absl::OkStatus();
  auto memory = FlatBuffer::Allocate(numel_, dtype_, device_, kind_,
                                     zeros_ ? Fill::kZero : Fill::kNone);
  TESSERA_RETURN_IF_ERROR(Annotate(memory.status(), what_));
  if (!zeros_) {
    TESSERA_RETURN_IF_ERROR(
        disk_->Read(extent_, 0, memory->data(), bytes(), what_).Wait());
  }
  memory_ = *std::move(memory);
  return absl::OkStatus();
}

absl::Status TieredBuffer::Lower(bool changed) {
  if (disk_ == nullptr || !in_memory()) return absl::OkStatus();
  if (changed) {
    TESSERA_RETURN_IF_ERROR(
        disk_->Write(extent_, 0, memory_.data(), bytes(), what_).Wait());
    zeros_ = false;
  }
  memory_.Reset();
  return absl::OkStatus();
}

void TieredBuffer::StartStore(FlatBuffer memory) {
  TESSERA_CHECK(on_disk() && !in_memory() && memory.numel() == numel_) << what_;
  memory_ = std::move(memory);
  storing_ = disk_->Write(extent_, 0, memory_.data(), bytes(), what_);
}

absl::Status TieredBuffer::FinishStore() {
  const absl::Status stored = std::exchange(storing_, SwapFuture()).Wait();
  if (stored.ok()) zeros_ = false;
  memory_.Reset();
  return stored;
}

void TieredBuffer::Drop() {
  if (disk_ != nullptr) memory_.Reset();
}

absl::Status TieredBuffer::ReadBytes(int64_t begin, int64_t bytes,
                                     char* to) const {
  if (disk_ == nullptr) {
    std::memcpy(to, memory_.data() + begin, static_cast<size_t>(bytes));
    return absl::OkStatus();
  }
  if (zeros_) {
    std::memset(to, 0, static_cast<size_t>(bytes));
    return absl::OkStatus();
  }
  const int64_t from = begin / kSwapAlignment * kSwapAlignment;
  if (from == begin)
    return disk_->Read(extent_, begin, to, bytes, what_).Wait();
  const int64_t whole = begin + bytes - from;
  TESSERA_ASSIGN_OR_RETURN(const CountedBuffer around,
                           AllocateCounted(whole, MemoryKind::kOther));
  TESSERA_RETURN_IF_ERROR(
      disk_->Read(extent_, from, around.data(), whole, what_).Wait());
  std::memcpy(to, around.data_as<char>() + (begin - from),
              static_cast<size_t>(bytes));
  return absl::OkStatus();
}

absl::Status TieredBuffer::WriteBytes(int64_t begin, int64_t bytes,
                                      const void* from) {
  TESSERA_CHECK(on_disk() && !in_memory() &&
                (!zeros_ || bytes == this->bytes()))
      << what_;
  TESSERA_RETURN_IF_ERROR(
      disk_->Write(extent_, begin, from, bytes, what_).Wait());
  zeros_ = false;
  return absl::OkStatus();
}

absl::StatusOr<Raised> Raised::Of(TieredBuffer* buffer) {
  if (buffer == nullptr || !buffer->defined() || buffer->in_memory()) {
    return Raised(nullptr);
  }
  TESSERA_RETURN_IF_ERROR(buffer->Raise());
  return Raised(buffer);
}

}  // namespace tessera
