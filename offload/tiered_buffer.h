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
// Other users of an offloaded buffer raise it to memory for a moment:
//
//     TESSERA_ASSIGN_OR_RETURN(Raised raised, Raised::Of(&buffer));
//     ... raised.View() ...
//     return raised.Commit();  // where that has changed
//
// On a disk, elements that nobody has written are zeros, and cost no write.
// Copies between a device and the host are ASYNC, on the current stream, and
// are ordered whatever their streams; copies between a device and a disk block,
// and take as much of the host's memory.
//
// Errors are those of the swap file, ResourceExhausted where memory or room on
// the disk is refused.
//
// Threads: none of its own; the caller orders the calls. ReadBytes of an
// offloaded buffer may run concurrently with Raise and Drop; tier and size may
// be read concurrently with all calls except Move and Reset.
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

// HostElements: elements on the host, of a unit on a device, as they are once
// the device has done its work on them so far.
struct HostElements {
  at::Tensor elements;       // as View
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

class TieredBuffer {
 public:
  struct Place {
    Tier tier = Tier::kMemory;
    std::shared_ptr<SwapFile> disk;  // of kDisk
  };

  TieredBuffer() = default;
  // Allocates zeros, for a unit on `device`. `what` is for messages: "exp_avg
  // of unit layers.3". REQUIRES: with kHost the device is not the CPU. LOCAL.
  static absl::StatusOr<TieredBuffer> Allocate(int64_t numel,
                                               ElementFormat format,
                                               at::Device device,
                                               MemoryKind kind, Place place,
                                               std::string what);
  // Makes a buffer over existing memory, with elements one by one.
  static TieredBuffer Over(FlatBuffer memory, std::string what);
  // Moves the buffer to `to`, with its values; after an error it is where it
  // was. REQUIRES: one of the two places is kMemory, or they are the same; not
  // raised.
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
  // Whether it is offloaded: not where its unit is, except while it is raised.
  bool elsewhere() const { return on_disk() || on_host(); }
  // Returns the bytes of the device's memory that it takes now.
  int64_t resident_bytes() const { return memory_.bytes(); }

  // ---- in memory, or raised

  bool in_memory() const { return memory_.defined(); }
  // Returns the elements, [n], or the bytes of blocks. REQUIRES: in_memory.
  const at::Tensor& View() const { return memory_.View(); }
  // Returns a range of the elements. REQUIRES: begins with a block.
  at::Tensor View(Range range) const {
    return memory_.View(format_.InTensor(range));
  }
  const FlatBuffer& memory() const { return memory_; }
  // Gives away the memory; the buffer is undefined then. REQUIRES:
  // !elsewhere().
  FlatBuffer TakeMemory();
  // Loads an offloaded buffer to memory; does nothing where it is in memory.
  absl::Status Raise();
  // Ends Raise, for an offloaded buffer: writes it back if `changed`, and frees
  // the memory. After an error it is still in memory.
  absl::Status Lower(bool changed);
  // Calls Lower where nothing has changed.
  void Drop();
  // Starts to store `memory`, which looks as View, as the buffer's values; with
  // a disk it stays in memory until FinishStore, which waits. REQUIRES:
  // elsewhere, and not in memory; for a device, on the host.
  absl::Status StartStore(FlatBuffer memory);
  absl::Status FinishStore();

  // ---- elsewhere

  // Copy elements of the offloaded buffer, raised or not, to `to` or from
  // `from`, which look as View(range) and are on the unit's device. CopyFrom
  // requires what WriteBytes does.
  absl::Status CopyTo(Range range, const at::Tensor& to) const;
  absl::Status CopyFrom(Range range, const at::Tensor& from);
  // Copies bytes [begin, begin + bytes) to `to`, from the host or disk if it is
  // offloaded. Blocking.
  absl::Status ReadBytes(int64_t begin, int64_t bytes, char* to) const;

  // ---- on the host

  // Returns the elements, which the host may read and write after Wait, until
  // the buffer is next raised or copied. REQUIRES: on the host, and not raised.
  HostElements Host() const;

  // ---- what it is to hold next

  // Makes as much room again where it lies, on the host or on a disk, so that
  // its next values can be written there while it keeps the old ones, until
  // SwapNext exchanges the two. REQUIRES: elsewhere. ResourceExhausted. LOCAL.
  absl::Status MakeRoomForNext();
  bool has_next() const { return next_.has_value() || next_host_.defined(); }
  const std::optional<SwapExtent>& next() const { return next_; }  // on a disk
  HostElements NextOnHost() const;
  // Exchanges the values with the next ones. REQUIRES: has_next, all of it
  // written or being written; not raised.
  void SwapNext();
  // Frees the room for next values. REQUIRES: nobody writes there.
  void DropNext();

  // ---- on a disk

  SwapFile* disk() const { return disk_.get(); }
  const SwapExtent& extent() const { return extent_; }
  const std::string& what() const { return what_; }
  // Whether it was never written: its elements are zeros, whatever the disk has
  // there. Whoever writes the whole extent calls SetWritten.
  bool zeros() const { return zeros_; }
  void SetWritten() { zeros_ = false; }
  // Writes bytes to the disk. REQUIRES: on a disk; `begin` is a multiple of
  // kSwapAlignment; all bytes are written if zeros(). Blocking.
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

// Raised: keeps a buffer in memory from Of to the end of this, or to Commit. It
// costs nothing where the buffer is in memory anyway, or is null or undefined.
class Raised {
 public:
  static absl::StatusOr<Raised> Of(TieredBuffer* buffer);
  Raised(Raised&& other) noexcept
      : buffer_(other.buffer_), lowers_(std::exchange(other.lowers_, false)) {}
  Raised& operator=(Raised&&) = delete;
  ~Raised() {
    if (lowers_) buffer_->Drop();
  }
  // Returns TieredBuffer::View; undefined where there is no buffer.
  at::Tensor View() const {
    return buffer_ == nullptr ? at::Tensor() : buffer_->View();
  }
  // Writes the changes back to where the buffer lies. After an error they are
  // lost.
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
