// TieredBuffer: [n] elements of one state of one unit (its masters, or a moment
// of the optimizer), of a format (offload/element_format.h), which lie in a
// tier:
//
//   kMemory   of the device where the unit is: a FlatBuffer, always: View
//   kHost     pinned memory of the host, of a unit on a device. A step works on
//             it there: Host
//   kDisk     an extent of the rank's swap file. A step streams it through a
//             few small buffers (offload/update_stream.h)
//
// What else needs what lies elsewhere raises it to memory for a moment:
//
//     TESSERA_ASSIGN_OR_RETURN(Raised raised, Raised::Of(&buffer));
//     ... raised.View() ...
//     return raised.Commit();  // where that has changed
//
// On a disk what nobody has written is zeros, and costs no write. Copies
// between a device and the host are ASYNC, on the current stream, and come
// after one another whatever their streams; between a device and a disk they
// block, and take as much of the host's memory.
//
// Errors are those of the swap file, ResourceExhausted where memory or room on
// the disk is refused.
//
// Threads: none of its own; the caller orders the calls. ReadBytes of what lies
// elsewhere may run beside Raise and Drop; where it lies, and how much, may be
// asked beside all but Move and Reset.
#ifndef OFFLOAD_TIERED_BUFFER_H_
#define OFFLOAD_TIERED_BUFFER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

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

// Elements on the host, of a unit on a device, as they are when the device has
// done what it had been given with them.
struct HostElements {
  at::Tensor elements;       // as View
  StreamPoint read, filled;  // by the device
  ElementFormat format;
  // A range of them, for a thread that works on memory which others have views
  // of. REQUIRES: begins with a block.
  at::Tensor Part(Range range) const {
    const Range part = format.InTensor(range);
    return ElementsOver(elements, part.begin, part.numel());
  }
  // For the host to read and write. Blocking; throws c10::Error.
  const at::Tensor& Wait() const;
};

class TieredBuffer {
 public:
  struct Place {
    Tier tier = Tier::kMemory;
    std::shared_ptr<SwapFile> disk;  // of kDisk
  };

  TieredBuffer() = default;
  // Zeros, of a unit on `device`. `what` is for messages: "exp_avg of unit
  // layers.3". REQUIRES: with kHost the device is not the CPU. LOCAL.
  static absl::StatusOr<TieredBuffer> Allocate(int64_t numel,
                                               ElementFormat format,
                                               at::Device device,
                                               MemoryKind kind, Place place,
                                               std::string what);
  // Elements one by one in memory that is there.
  static TieredBuffer Over(FlatBuffer memory, std::string what);
  // Lies in `to` from here on, with what it holds; after an error where it was.
  // REQUIRES: one of the two is kMemory, or they are the same; not raised.
  absl::Status Move(Place to);
  TieredBuffer(TieredBuffer&& other) noexcept;
  TieredBuffer& operator=(TieredBuffer&& other) noexcept;
  ~TieredBuffer() { Reset(); }
  void Reset();

  bool defined() const { return numel_ >= 0; }
  int64_t numel() const { return defined() ? numel_ : 0; }
  const ElementFormat& format() const { return format_; }
  at::ScalarType dtype() const { return format_.dtype; }  // of tensors
  int64_t bytes() const { return format_.BytesOf(numel()); }
  Tier tier() const { return tier_; }
  bool on_disk() const { return tier_ == Tier::kDisk; }
  bool on_host() const { return tier_ == Tier::kHost; }
  // Not where the unit is, but while it is raised.
  bool elsewhere() const { return on_disk() || on_host(); }
  // Bytes of the device's memory that it takes now.
  int64_t resident_bytes() const { return memory_.bytes(); }

  // ---- in memory, or raised

  bool in_memory() const { return memory_.defined(); }
  // [n]; in blocks their bytes. REQUIRES: in_memory.
  const at::Tensor& View() const { return memory_.View(); }
  // Of it. REQUIRES: begins with a block.
  at::Tensor View(Range range) const {
    return memory_.View(format_.InTensor(range));
  }
  const FlatBuffer& memory() const { return memory_; }
  // The memory, given away; nothing is left. REQUIRES: !elsewhere().
  FlatBuffer TakeMemory();
  // Reads what lies elsewhere; nothing to do where it is in memory.
  absl::Status Raise();
  // Back to where it lies, if that is elsewhere: written if `changed`. After an
  // error it is in memory still.
  absl::Status Lower(bool changed);
  // Lower, where nothing has changed.
  void Drop();
  // `memory`, as View, becomes what it holds, and is on its way there;
  // with a disk it is in memory until FinishStore, which waits. REQUIRES:
  // elsewhere, and not in memory; of a device, on the host.
  absl::Status StartStore(FlatBuffer memory);
  absl::Status FinishStore();

  // ---- elsewhere

  // Copies elements of what lies there, raised or not, to `to`, or from
  // `from`: as View(range), on the unit's device. From: as WriteBytes.
  absl::Status CopyTo(Range range, const at::Tensor& to) const;
  absl::Status CopyFrom(Range range, const at::Tensor& from);
  // Copies bytes [begin, begin + bytes) to `to`: of what lies there if it is
  // elsewhere. Blocking.
  absl::Status ReadBytes(int64_t begin, int64_t bytes, char* to) const;

  // ---- on the host

  // What the host may read and write, behind Wait, until it is next raised or
  // copied. REQUIRES: on the host, and not raised.
  HostElements Host() const;

  // ---- what it is to hold next

  // As much room again where it lies, on the host or on a disk: what it is to
  // hold next can be written there while it holds what it does. Until Flip,
  // which exchanges the two. REQUIRES: elsewhere. ResourceExhausted. LOCAL.
  absl::Status MakeRoomForNext();
  bool has_next() const { return next_.has_value() || next_host_.defined(); }
  const std::optional<SwapExtent>& next() const { return next_; }  // on a disk
  HostElements NextOnHost() const;
  // REQUIRES: has_next, all of it written or being written; not raised.
  void Flip();
  // REQUIRES: nobody writes there.
  void DropNext();

  // ---- on a disk

  SwapFile* disk() const { return disk_.get(); }
  const SwapExtent& extent() const { return extent_; }
  const std::string& what() const { return what_; }
  // Nobody has written it: zeros, whatever the disk has there. Who writes all
  // of the extent says so.
  bool zeros() const { return zeros_; }
  void SetWritten() { zeros_ = false; }
  // To the disk. REQUIRES: on a disk; `begin` is a multiple of
  // kSwapAlignment; all of it if it is zeros. Blocking.
  absl::Status WriteBytes(int64_t begin, int64_t bytes, const void* from);

 private:
  void FreeElsewhere();
  Range AllElements() const { return {0, numel_}; }
  int64_t TensorNumel() const { return format_.TensorNumel(numel_); }

  Tier tier_ = Tier::kMemory;
  std::shared_ptr<SwapFile> disk_;
  SwapExtent extent_;
  std::optional<SwapExtent> next_;
  std::string what_;
  bool zeros_ = false;
  SwapFuture storing_;
  PinnedBuffer host_;         // on the host
  mutable StreamPoint read_;  // the device has read host_ so far
  StreamPoint filled_;        // and has written it
  PinnedBuffer next_host_;
  StreamPoint next_read_, next_filled_;  // of that
  FlatBuffer memory_;
  int64_t numel_ = -1;
  ElementFormat format_;
  at::Device device_ = at::kCPU;
  MemoryKind kind_ = MemoryKind::kOther;
};

// Raised: a buffer that is in memory from Of to the end of this, or to Commit.
// It costs nothing where the buffer is in memory anyway; a null or undefined
// buffer is none.
class Raised {
 public:
  static absl::StatusOr<Raised> Of(TieredBuffer* buffer);
  Raised(Raised&& other) noexcept
      : buffer_(other.buffer_), lowers_(std::exchange(other.lowers_, false)) {}
  Raised& operator=(Raised&&) = delete;
  ~Raised() {
    if (lowers_) buffer_->Drop();
  }
  // As TieredBuffer::View; undefined where there is no buffer.
  at::Tensor View() const {
    return buffer_ == nullptr ? at::Tensor() : buffer_->View();
  }
  // What has changed goes to where it lies. After an error it is lost.
  absl::Status Commit() {
    return lowers_ ? buffer_->Lower(/*changed=*/true) : absl::OkStatus();
  }

 private:
  Raised(TieredBuffer* buffer, bool lowers)
      : buffer_(buffer), lowers_(lowers) {}
  TieredBuffer* buffer_;
  bool lowers_;
};

}  // namespace tessera
#endif  // OFFLOAD_TIERED_BUFFER_H_
