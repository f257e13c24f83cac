#include "offload/tiered_buffer.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "base/torch/tensor_over.h"
#include "base/torch_guard.h"

namespace tessera {

const at::Tensor& HostElements::Wait() const {
  filled.Wait();
  read.Wait();
  return elements;
}

absl::StatusOr<TieredBuffer> TieredBuffer::Allocate(
    int64_t numel, ElementFormat format, at::Device device, MemoryKind kind,
    Place place, std::string what) {
  TieredBuffer buffer;
  TESSERA_CHECK(place.tier != Tier::kHost || !device.is_cpu()) << what;
  if (place.tier == Tier::kMemory) {
    TESSERA_ASSIGN_OR_RETURN(buffer.memory_,
                             FlatBuffer::Allocate(format.TensorNumel(numel),
                                                  format.dtype, device, kind));
  } else if (place.tier == Tier::kHost) {
    auto host =
        PinnedBuffer::Allocate(format.TensorNumel(numel), format.dtype, kind);
    TESSERA_RETURN_IF_ERROR(Annotate(host.status(), what));
    buffer.host_ = *std::move(host);
  } else {
    auto extent = place.disk->Allocate(format.BytesOf(numel));
    TESSERA_RETURN_IF_ERROR(Annotate(extent.status(), what));
    buffer.extent_ = *extent;
    buffer.disk_ = std::move(place.disk);
    buffer.zeros_ = true;
  }
  buffer.tier_ = place.tier;
  buffer.what_ = std::move(what);
  buffer.numel_ = numel;
  buffer.format_ = format;
  buffer.device_ = device;
  buffer.kind_ = kind;
  return buffer;
}

TieredBuffer TieredBuffer::Over(FlatBuffer memory, std::string what) {
  TieredBuffer buffer;
  buffer.what_ = std::move(what);
  buffer.numel_ = memory.numel();
  buffer.format_ = memory.dtype();
  buffer.device_ = memory.View().device();
  buffer.memory_ = std::move(memory);
  return buffer;
}

absl::Status TieredBuffer::Move(Place to) {
  if (to.tier == tier()) return absl::OkStatus();
  if (tier() == Tier::kMemory) {
    TESSERA_ASSIGN_OR_RETURN(
        TieredBuffer there,
        Allocate(numel_, format_, device_, kind_, std::move(to), what_));
    TESSERA_RETURN_IF_ERROR(there.CopyFrom(AllElements(), memory_.View()));
    *this = std::move(there);
    return absl::OkStatus();
  }
  TESSERA_CHECK(to.tier == Tier::kMemory && !in_memory()) << what_;
  TESSERA_RETURN_IF_ERROR(Raise());
  FreeElsewhere();
  zeros_ = false;
  return absl::OkStatus();
}

TieredBuffer::TieredBuffer(TieredBuffer&& other) noexcept {
  *this = std::move(other);
}

TieredBuffer& TieredBuffer::operator=(TieredBuffer&& other) noexcept {
  if (this == &other) return *this;
  Reset();
  tier_ = std::exchange(other.tier_, Tier::kMemory);
  disk_ = std::move(other.disk_);
  extent_ = other.extent_;
  next_ = std::exchange(other.next_, std::nullopt);
  what_ = std::move(other.what_);
  zeros_ = other.zeros_;
  storing_ = std::move(other.storing_);
  host_ = std::move(other.host_);
  read_ = std::move(other.read_);
  filled_ = std::move(other.filled_);
  next_host_ = std::move(other.next_host_);
  next_read_ = std::move(other.next_read_);
  next_filled_ = std::move(other.next_filled_);
  memory_ = std::move(other.memory_);
  numel_ = std::exchange(other.numel_, -1);
  format_ = other.format_;
  device_ = other.device_;
  kind_ = other.kind_;
  return *this;
}

void TieredBuffer::Reset() {
  if (on_disk()) (void)storing_.Wait();
  FreeElsewhere();
  memory_.Reset();
  numel_ = -1;
}

void TieredBuffer::FreeElsewhere() {
  DropNext();
  if (on_disk()) disk_->Free(extent_);
  tier_ = Tier::kMemory;
  host_.Reset({std::exchange(read_, {}), std::exchange(filled_, {})});
  disk_ = nullptr;
}

void TieredBuffer::DropNext() {
  next_host_.Reset(
      {std::exchange(next_read_, {}), std::exchange(next_filled_, {})});
  if (next_.has_value()) disk_->Free(*next_);
  next_.reset();
}

absl::Status TieredBuffer::MakeRoomForNext() {
  if (has_next()) return absl::OkStatus();
  if (on_host()) {
    auto room = PinnedBuffer::Allocate(TensorNumel(), dtype(), kind_);
    TESSERA_RETURN_IF_ERROR(Annotate(room.status(), what_));
    next_host_ = *std::move(room);
    return absl::OkStatus();
  }
  auto room = disk_->AllocateSpare(bytes());
  TESSERA_RETURN_IF_ERROR(Annotate(room.status(), what_));
  next_ = *room;
  return absl::OkStatus();
}

void TieredBuffer::SwapNext() {
  TESSERA_CHECK(has_next() && !in_memory()) << what_;
  if (on_host()) {
    std::swap(host_, next_host_);
    std::swap(read_, next_read_);
    std::swap(filled_, next_filled_);
    return;
  }
  std::swap(extent_, *next_);
  zeros_ = false;
}

HostElements TieredBuffer::Host() const {
  TESSERA_CHECK(on_host() && !in_memory()) << what_;
  return {host_.View(), read_, filled_, format_};
}

HostElements TieredBuffer::NextOnHost() const {
  TESSERA_CHECK(next_host_.defined()) << what_;
  return {next_host_.View(), next_read_, next_filled_, format_};
}

FlatBuffer TieredBuffer::TakeMemory() {
  FlatBuffer memory = std::move(memory_);
  Reset();
  return memory;
}

absl::Status TieredBuffer::Raise() {
  if (in_memory()) return absl::OkStatus();
  auto memory = FlatBuffer::Allocate(TensorNumel(), dtype(), device_, kind_,
                                     zeros_ ? Fill::kZero : Fill::kNone);
  TESSERA_RETURN_IF_ERROR(Annotate(memory.status(), what_));
  if (!zeros_) TESSERA_RETURN_IF_ERROR(CopyTo(AllElements(), memory->View()));
  memory_ = *std::move(memory);
  return absl::OkStatus();
}

absl::Status TieredBuffer::Lower(bool changed) {
  if (!elsewhere() || !in_memory()) return absl::OkStatus();
  if (changed) {
    TESSERA_RETURN_IF_ERROR(CopyFrom(AllElements(), memory_.View()));
  }
  memory_.Reset();
  return absl::OkStatus();
}

absl::Status TieredBuffer::StartStore(FlatBuffer memory) {
  TESSERA_CHECK(elsewhere() && !in_memory() && memory.numel() == TensorNumel())
      << what_;
  if (on_host()) return CopyFrom(AllElements(), memory.View());
  TESSERA_CHECK(device_.is_cpu()) << what_;
  memory_ = std::move(memory);
  storing_ = disk_->Write(extent_, 0, memory_.data(), bytes(), what_);
  return absl::OkStatus();
}

absl::Status TieredBuffer::FinishStore() {
  if (on_host()) return absl::OkStatus();
  const absl::Status stored = std::exchange(storing_, SwapFuture()).Wait();
  if (stored.ok()) zeros_ = false;
  memory_.Reset();
  return stored;
}

void TieredBuffer::Drop() {
  if (elsewhere()) memory_.Reset();
}

absl::Status TieredBuffer::CopyTo(Range range, const at::Tensor& to) const {
  const int64_t begin = format_.BytesOf(range.begin);
  const int64_t bytes = format_.BytesOf(range.numel());
  if (!on_host() && device_.is_cpu()) {
    return ReadBytes(begin, bytes, static_cast<char*>(to.mutable_data_ptr()));
  }
  if (!on_host()) {
    TESSERA_ASSIGN_OR_RETURN(const CountedBuffer between,
                             AllocateCounted(bytes, MemoryKind::kOther));
    TESSERA_RETURN_IF_ERROR(ReadBytes(begin, bytes, between.data_as<char>()));
    return CatchTorch(what_, [&] {
      to.copy_(TensorOver(between.data_as<char>(), to.sizes(), {1}, dtype(),
                          at::kCPU));
    });
  }
  return CatchTorch(what_, [&] {
    filled_.Order();
    to.copy_(host_.View(format_.InTensor(range)), /*non_blocking=*/true);
    read_.Order();
    read_ = StreamPoint::Now(device_);
  });
}

absl::Status TieredBuffer::CopyFrom(Range range, const at::Tensor& from) {
  if (!on_host()) {
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor here, CatchTorch(what_, [&] {
                               return from.cpu();
                             }));  // itself on the CPU
    return WriteBytes(format_.BytesOf(range.begin),
                      format_.BytesOf(range.numel()), here.const_data_ptr());
  }
  return CatchTorch(what_, [&] {
    read_.Order();
    filled_.Order();
    host_.View(format_.InTensor(range)).copy_(from, /*non_blocking=*/true);
    filled_ = StreamPoint::Now(device_);
  });
}

absl::Status TieredBuffer::ReadBytes(int64_t begin, int64_t bytes,
                                     char* to) const {
  if (on_host()) {
    TESSERA_RETURN_IF_ERROR(CatchTorch(what_, [&] { filled_.Wait(); }));
    std::memcpy(to, host_.data() + begin, static_cast<size_t>(bytes));
    return absl::OkStatus();
  }
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
  TESSERA_CHECK(on_disk() && (!zeros_ || bytes == this->bytes())) << what_;
  TESSERA_RETURN_IF_ERROR(
      disk_->Write(extent_, begin, from, bytes, what_).Wait());
  zeros_ = false;
  return absl::OkStatus();
}

absl::StatusOr<Raised> Raised::Of(TieredBuffer* buffer) {
  if (buffer == nullptr || !buffer->defined()) return Raised(nullptr, false);
  if (buffer->in_memory()) return Raised(buffer, false);
  TESSERA_RETURN_IF_ERROR(buffer->Raise());
  return Raised(buffer, true);
}

}  // namespace tessera
