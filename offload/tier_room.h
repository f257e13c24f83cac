// TierRoom: room for the elements of one state of a unit off the unit's device,
// in a tier:
//
//   kHost   pinned memory of the host, of a unit on a device. A step works on
//           it there: Host
//   kDisk   an extent of the rank's swap file. A step streams it through a few
//           small buffers (offload/update_stream.h)
//
// On a disk, elements that nobody has written are zeros, and cost no write.
// Copies between a device and the host are ASYNC, on the current stream (except
// StartCopyFrom), and are ordered whatever their streams; copies between a
// device and a disk block, and take as much of the host's memory.
//
// Errors are those of the swap file, ResourceExhausted where memory or room on
// the disk is refused.
//
// Threads: none of its own; the caller orders the calls. ReadBytes may run
// concurrently with itself and with CopyTo.
#ifndef OFFLOAD_TIER_ROOM_H_
#define OFFLOAD_TIER_ROOM_H_

#include <cstdint>
#include <memory>
#include <string>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/layout/flat_buffer.h"
#include "base/layout/layout.h"
#include "base/stream/stream_point.h"
#include "offload/disk/swap_file.h"
#include "offload/element_format.h"
#include "offload/pinned_buffer.h"

namespace tessera {

enum class Tier : uint8_t { kMemory, kHost, kDisk };

// What a state of a unit on `device` is, wherever it lies.
struct TieredState {
  int64_t numel = 0;
  ElementFormat format;
  at::Device device = at::kCPU;
  MemoryKind kind = MemoryKind::kOther;
  std::string what;  // for messages: "exp_avg of unit layers.3"

  int64_t bytes() const { return format.BytesOf(numel); }
  int64_t TensorNumel() const { return format.TensorNumel(numel); }
};

// HostElements: elements on the host, of a unit on a device, as they are once
// the device has done its work on them so far.
struct HostElements {
  at::Tensor elements;       // as TieredBuffer::View
  StreamPoint read, filled;  // by the device
  ElementFormat format;
  // Returns a range of them, for a thread that works on memory which others
  // have views of. REQUIRES: begins with a block.
  at::Tensor Part(Range range) const {
    const Range part = format.InTensor(range);
    return ElementsOver(elements, part.begin, part.numel());
  }
  // Waits until the host may read and write them. Blocking; throws c10::Error.
  const at::Tensor& Wait() const;
};

class TierRoom {
 public:
  TierRoom() = default;  // none
  // Allocates room for zeros: on `disk`, or on the host where that is null.
  // `spare`: it is optional (SwapFile::AllocateSpare). LOCAL.
  static absl::StatusOr<TierRoom> Allocate(
      std::shared_ptr<const TieredState> state, std::shared_ptr<SwapFile> disk,
      bool spare = false);
  TierRoom(TierRoom&&) = default;
  TierRoom& operator=(TierRoom&& other) noexcept;
  ~TierRoom() { Reset(); }
  // Frees the room. REQUIRES: no request on a disk is under way.
  void Reset();

  bool defined() const { return state_ != nullptr; }
  bool on_host() const { return defined() && disk_ == nullptr; }
  // Returns the swap file; null: on the host.
  const std::shared_ptr<SwapFile>& disk() const { return disk_; }
  const SwapExtent& extent() const { return extent_; }
  // Whether it was never written: its elements are zeros, whatever the disk has
  // there. Whoever writes the whole extent calls SetWritten.
  bool zeros() const { return zeros_; }
  void SetWritten() { zeros_ = false; }
  // Returns the elements on the host.
  HostElements Host() const;

  // Exchanges the elements with those of the same state's other room, which
  // have all been written, or are being. Tiers may be read meanwhile.
  void Swap(TierRoom* other);

  // Copy elements to `to`, or from `from`, which are on the unit's device.
  // CopyFrom requires what WriteBytes does.
  absl::Status CopyTo(Range range, const at::Tensor& to) const;
  absl::Status CopyFrom(Range range, const at::Tensor& from);
  // As CopyFrom, to the host, on a stream of its own that comes after what the
  // current stream has been given: kernels go on meanwhile. `from` must be
  // changed or freed only after filled(). ASYNC. REQUIRES: on the host.
  absl::Status StartCopyFrom(Range range, const at::Tensor& from);
  // Returns the point at which the device has written the elements on the host.
  const StreamPoint& filled() const { return filled_; }
  // Copies bytes [begin, begin + bytes) to `to`. Blocking.
  absl::Status ReadBytes(int64_t begin, int64_t bytes, char* to) const;
  // Writes bytes to the disk. REQUIRES: on a disk; `begin` is a multiple of
  // kSwapAlignment; all bytes are written if zeros(). Blocking.
  absl::Status WriteBytes(int64_t begin, int64_t bytes, const void* from);

 private:
  std::shared_ptr<const TieredState> state_;
  std::shared_ptr<SwapFile> disk_;
  SwapExtent extent_;
  bool zeros_ = false;
  PinnedBuffer host_;         // on the host
  mutable StreamPoint read_;  // the device has read host_ so far
  StreamPoint filled_;        // and has written it
};

}  // namespace tessera
#endif  // OFFLOAD_TIER_ROOM_H_
