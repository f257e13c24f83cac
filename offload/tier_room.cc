#include "offload/tier_room.h"

#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "base/stream/side_stream.h"
#include "base/torch/tensor_over.h"
#include "base/torch_guard.h"
#include "c10/core/StreamGuard.h"

namespace tessera {

const at::Tensor& HostElements::Wait() const {
  filled.Wait();
  read.Wait();
  return elements;
}

absl::StatusOr<TierRoom> TierRoom::Allocate(
    std::shared_ptr<const TieredState> state, std::shared_ptr<SwapFile> disk,
    bool spare) {
  TierRoom room;
  if (disk == nullptr) {
    TESSERA_CHECK(!state->device.is_cpu()) << state->what;
    auto host = PinnedBuffer::Allocate(state->TensorNumel(),
                                       state->format.dtype, state->kind);
    TESSERA_RETURN_IF_ERROR(Annotate(host.status(), state->what));
    room.host_ = *std::move(host);
  } else {
    auto extent = spare ? disk->AllocateSpare(state->bytes())
                        : disk->Allocate(state->bytes());
    TESSERA_RETURN_IF_ERROR(Annotate(extent.status(), state->what));
    room.extent_ = *extent;
    room.zeros_ = true;
  }
  room.disk_ = std::move(disk);
  room.state_ = std::move(state);
  return room;
}

TierRoom& TierRoom::operator=(TierRoom&& other) noexcept {
  if (this == &other) return *this;
  Reset();
  state_ = std::move(other.state_);
  disk_ = std::move(other.disk_);
  extent_ = other.extent_;
  zeros_ = other.zeros_;
  host_ = std::move(other.host_);
  read_ = std::exchange(other.read_, {});
  filled_ = std::exchange(other.filled_, {});
  return *this;
}

void TierRoom::Reset() {
  if (disk_ != nullptr) disk_->Free(extent_);
  disk_ = nullptr;
  extent_ = {};
  zeros_ = false;
  host_.Reset({std::exchange(read_, {}), std::exchange(filled_, {})});
  state_ = nullptr;
}

void TierRoom::Swap(TierRoom* other) {
  std::swap(extent_, other->extent_);
  std::swap(host_, other->host_);
  std::swap(read_, other->read_);
  std::swap(filled_, other->filled_);
  zeros_ = false;
}

HostElements TierRoom::Host() const {
  TESSERA_CHECK(on_host());
  return {host_.View(), read_, filled_, state_->format};
}

absl::Status TierRoom::CopyTo(Range range, const at::Tensor& to) const {
  const int64_t begin = state_->format.BytesOf(range.begin);
  const int64_t bytes = state_->format.BytesOf(range.numel());
  if (on_host()) {
    return CatchTorch(state_->what, [&] {
      filled_.Order();
      to.copy_(host_.View(state_->format.InTensor(range)),
               /*non_blocking=*/true);
      read_.Order();
      read_ = StreamPoint::Now(state_->device);
    });
  }
  if (state_->device.is_cpu()) {
    return ReadBytes(begin, bytes, static_cast<char*>(to.mutable_data_ptr()));
  }
  TESSERA_ASSIGN_OR_RETURN(const CountedBuffer between,
                           AllocateCounted(bytes, MemoryKind::kOther));
  TESSERA_RETURN_IF_ERROR(ReadBytes(begin, bytes, between.data_as<char>()));
  return CatchTorch(state_->what, [&] {
    to.copy_(TensorOver(between.data_as<char>(), to.sizes(), {1},
                        state_->format.dtype, at::kCPU));
  });
}

absl::Status TierRoom::CopyFrom(Range range, const at::Tensor& from) {
  if (on_host()) {
    return CatchTorch(state_->what, [&] {
      read_.Order();
      filled_.Order();
      host_.View(state_->format.InTensor(range))
          .copy_(from, /*non_blocking=*/true);
      filled_ = StreamPoint::Now(state_->device);
    });
  }
  TESSERA_ASSIGN_OR_RETURN(const at::Tensor here, CatchTorch(state_->what, [&] {
                             return from.cpu();
                           }));  // itself on the CPU
  return WriteBytes(state_->format.BytesOf(range.begin),
                    state_->format.BytesOf(range.numel()),
                    here.const_data_ptr());
}

absl::Status TierRoom::StartCopyFrom(Range range, const at::Tensor& from) {
  TESSERA_CHECK(on_host()) << state_->what;
  return CatchTorch(state_->what, [&] {
    const StreamPoint made = StreamPoint::Now(state_->device);
    const c10::StreamGuard guard(HostBoundStream(state_->device));
    made.Order();
    return CopyFrom(range, from);
  });
}

absl::Status TierRoom::ReadBytes(int64_t begin, int64_t bytes, char* to) const {
  const auto size = static_cast<size_t>(bytes);
  if (on_host()) {
    TESSERA_RETURN_IF_ERROR(CatchTorch(state_->what, [&] { filled_.Wait(); }));
    std::memcpy(to, host_.data() + begin, size);
    return absl::OkStatus();
  }
  if (zeros_) {
    std::memset(to, 0, size);
    return absl::OkStatus();
  }
  const int64_t from = begin / kSwapAlignment * kSwapAlignment;
  if (from == begin) {
    return disk_->Read(extent_, begin, to, bytes, state_->what).Wait();
  }
  const int64_t whole = begin + bytes - from;
  TESSERA_ASSIGN_OR_RETURN(const CountedBuffer around,
                           AllocateCounted(whole, MemoryKind::kOther));
  TESSERA_RETURN_IF_ERROR(
      disk_->Read(extent_, from, around.data(), whole, state_->what).Wait());
  std::memcpy(to, around.data_as<char>() + (begin - from), size);
  return absl::OkStatus();
}

absl::Status TierRoom::WriteBytes(int64_t begin, int64_t bytes,
                                  const void* from) {
  TESSERA_CHECK(disk_ != nullptr && (!zeros_ || bytes == state_->bytes()))
      << state_->what;
  TESSERA_RETURN_IF_ERROR(
      disk_->Write(extent_, begin, from, bytes, state_->what).Wait());
  zeros_ = false;
  return absl::OkStatus();
}

}  // namespace tessera
