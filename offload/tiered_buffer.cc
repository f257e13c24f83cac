#include "offload/tiered_buffer.h"

#include <cstring>

#include "base/check.h"
#include "base/status.h"
#include "base/torch_guard.h"

namespace tessera {

absl::StatusOr<TieredBuffer> TieredBuffer::Allocate(
    int64_t numel, ElementFormat format, at::Device device, MemoryKind kind,
    Place place, std::string what) {
  TieredBuffer buffer;
  buffer.state_ = std::make_shared<const TieredState>(
      TieredState{numel, format, device, kind, std::move(what)});
  if (place.tier == Tier::kMemory) {
    TESSERA_ASSIGN_OR_RETURN(buffer.memory_,
                             FlatBuffer::Allocate(buffer.state_->TensorNumel(),
                                                  format.dtype, device, kind));
  } else {
    TESSERA_ASSIGN_OR_RETURN(
        buffer.room_,
        TierRoom::Allocate(buffer.state_, place.tier == Tier::kDisk
                                              ? std::move(place.disk)
                                              : nullptr));
  }
  return buffer;
}

TieredBuffer TieredBuffer::Over(FlatBuffer memory, std::string what) {
  TieredBuffer buffer;
  buffer.state_ = std::make_shared<const TieredState>(
      TieredState{memory.numel(), memory.dtype(), memory.View().device(),
                  MemoryKind::kOther, std::move(what)});
  buffer.memory_ = std::move(memory);
  return buffer;
}

absl::Status TieredBuffer::Move(Place to) {
  if (to.tier == tier()) return absl::OkStatus();
  if (tier() == Tier::kMemory) {
    TESSERA_ASSIGN_OR_RETURN(TieredBuffer there,
                             Allocate(numel(), format(), state_->device,
                                      state_->kind, std::move(to), what()));
    TESSERA_RETURN_IF_ERROR(there.CopyFrom({0, numel()}, memory_.View()));
    *this = std::move(there);
    return absl::OkStatus();
  }
  TESSERA_CHECK(to.tier == Tier::kMemory && !in_memory()) << what();
  TESSERA_RETURN_IF_ERROR(Raise());
  room_.Reset();
  next_.Reset();
  return absl::OkStatus();
}

TieredBuffer& TieredBuffer::operator=(TieredBuffer&& other) noexcept {
  if (this == &other) return *this;
  Reset();
  state_ = std::move(other.state_);
  room_ = std::move(other.room_);
  next_ = std::move(other.next_);
  storing_ = std::exchange(other.storing_, SwapFuture());
  leaves_ = std::exchange(other.leaves_, false);
  memory_ = std::move(other.memory_);
  return *this;
}

void TieredBuffer::Reset() {
  if (on_host()) (void)FinishStore();  // it is read until then
  (void)std::exchange(storing_, SwapFuture()).Wait();
  next_.Reset();
  room_.Reset();
  memory_.Reset();
  state_ = nullptr;
}

absl::Status TieredBuffer::MakeRoomForNext() {
  if (next_.defined()) return absl::OkStatus();
  TESSERA_CHECK(elsewhere()) << what();
  TESSERA_ASSIGN_OR_RETURN(
      next_, TierRoom::Allocate(state_, room_.disk(), /*spare=*/true));
  return absl::OkStatus();
}

void TieredBuffer::SwapNext() {
  TESSERA_CHECK(next_.defined() && !in_memory()) << what();
  room_.Swap(&next_);
}

FlatBuffer TieredBuffer::TakeMemory() {
  FlatBuffer memory = std::move(memory_);
  Reset();
  return memory;
}

absl::Status TieredBuffer::Raise() {
  if (in_memory()) return absl::OkStatus();
  auto memory = FlatBuffer::Allocate(state_->TensorNumel(), dtype(),
                                     state_->device, state_->kind,
                                     room_.zeros() ? Fill::kZero : Fill::kNone);
  TESSERA_RETURN_IF_ERROR(Annotate(memory.status(), what()));
  if (!room_.zeros()) {
    TESSERA_RETURN_IF_ERROR(CopyTo({0, numel()}, memory->View()));
  }
  memory_ = *std::move(memory);
  return absl::OkStatus();
}

absl::Status TieredBuffer::Lower(bool changed) {
  if (!elsewhere() || !in_memory()) return absl::OkStatus();
  if (changed) {
    TESSERA_RETURN_IF_ERROR(CopyFrom({0, numel()}, memory_.View()));
  }
  memory_.Reset();
  return absl::OkStatus();
}

absl::Status TieredBuffer::StartStore(FlatBuffer memory) {
  TESSERA_CHECK(elsewhere() && !in_memory() &&
                memory.numel() == state_->TensorNumel())
      << what();
  if (on_host()) {
    TESSERA_RETURN_IF_ERROR(room_.StartCopyFrom({0, numel()}, memory.View()));
    leaves_ = true;
    memory_ = std::move(memory);
    return absl::OkStatus();
  }
  TESSERA_CHECK(state_->device.is_cpu()) << what();
  memory_ = std::move(memory);
  storing_ =
      room_.disk()->Write(room_.extent(), 0, memory_.data(), bytes(), what());
  return absl::OkStatus();
}

absl::Status TieredBuffer::FinishStore() {
  if (on_host()) {
    if (!std::exchange(leaves_, false)) return absl::OkStatus();
    const absl::Status ordered =
        CatchTorch(what(), [&] { room_.filled().Order(); });
    memory_.Reset();
    return ordered;
  }
  const absl::Status stored = std::exchange(storing_, SwapFuture()).Wait();
  if (stored.ok()) room_.SetWritten();
  memory_.Reset();
  return stored;
}

void TieredBuffer::Drop() {
  if (elsewhere()) memory_.Reset();
}

absl::Status TieredBuffer::CopyTo(Range range, const at::Tensor& to) const {
  if (elsewhere()) return room_.CopyTo(range, to);
  return CatchTorch(what(), [&] { to.copy_(View(range)); });
}

absl::Status TieredBuffer::ReadBytes(int64_t begin, int64_t bytes,
                                     char* to) const {
  if (elsewhere()) return room_.ReadBytes(begin, bytes, to);
  std::memcpy(to, memory_.data() + begin, static_cast<size_t>(bytes));
  return absl::OkStatus();
}

HostElements TieredBuffer::Host() const {
  TESSERA_CHECK(on_host() && !in_memory()) << what();
  return room_.Host();
}

absl::StatusOr<Raised> Raised::Of(TieredBuffer* buffer) {
  if (buffer == nullptr || !buffer->defined()) return Raised(nullptr, false);
  if (buffer->in_memory()) return Raised(buffer, false);
  TESSERA_RETURN_IF_ERROR(buffer->Raise());
  return Raised(buffer, true);
}

}  // namespace tessera
