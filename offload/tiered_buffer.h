// TieredBuffer: [n] elements of one state of one unit (its masters, or a moment
// of the optimizer), of a format (offload/element_format.h), which lie in a
// tier: in memory of the device where the unit is (a FlatBuffer, always: View),
// or off it (offload/tier_room.h).
//
// Other users of an offloaded buffer raise it to memory for a moment:
//
//     TESSERA_ASSIGN_OR_RETURN(Raised raised, Raised::Of(&buffer));
//     ... raised.View() ...
//     return raised.Commit();  // where that has changed
//
// Errors are those of TierRoom.
//
// Threads: none of its own; the caller orders the calls. ReadBytes of an
// offloaded buffer may run concurrently with Raise and Drop; tier and size may
// be read concurrently with all calls except Move and Reset.
#ifndef OFFLOAD_TIERED_BUFFER_H_
#define OFFLOAD_TIERED_BUFFER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/layout/flat_buffer.h"
#include "base/layout/layout.h"
#include "offload/disk/swap_file.h"
#include "offload/element_format.h"
#include "offload/tier_room.h"

namespace tessera {

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
  TieredBuffer(TieredBuffer&&) = default;
  TieredBuffer& operator=(TieredBuffer&& other) noexcept;
  ~TieredBuffer() { Reset(); }
  void Reset();

  bool defined() const { return state_ != nullptr; }
  int64_t numel() const { return state().numel; }
  const ElementFormat& format() const { return state().format; }
  at::ScalarType dtype() const { return format().dtype; }  // of tensors
  int64_t bytes() const { return state().bytes(); }
  const std::string& what() const { return state().what; }
  Tier tier() const {
    return on_disk() ? Tier::kDisk : on_host() ? Tier::kHost : Tier::kMemory;
  }
  bool on_disk() const { return room_.disk() != nullptr; }
  bool on_host() const { return room_.on_host(); }
  // Whether it is offloaded: not where its unit is, except while it is raised.
  bool elsewhere() const { return room_.defined(); }
  // Returns the bytes of the device's memory that it takes now.
  int64_t resident_bytes() const { return memory_.bytes(); }

  // ---- in memory, or raised

  bool in_memory() const { return memory_.defined(); }
  // Returns the elements, [n], or the bytes of blocks. REQUIRES: in_memory.
  const at::Tensor& View() const { return memory_.View(); }
  // Returns a range of the elements. REQUIRES: begins with a block.
  at::Tensor View(Range range) const {
    return memory_.View(format().InTensor(range));
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
  // Starts to store `memory`, which looks as View, as the buffer's values. It
  // stays in memory until FinishStore. Of a device it goes to the host on a
  // stream of its own (TierRoom::StartCopyFrom), and the current stream of
  // FinishStore comes after that; with a disk FinishStore waits. REQUIRES:
  // elsewhere, and not in memory; for a device, on the host.
  absl::Status StartStore(FlatBuffer memory);
  // As Lower where it has changed, by StartStore: FinishStore frees the memory.
  // REQUIRES: elsewhere, and in memory.
  absl::Status StartLower() { return StartStore(std::move(memory_)); }
  absl::Status FinishStore();

  // ---- elsewhere

  // Returns where it lies off its device; undefined where it does not.
  TierRoom& room() { return room_; }
  const TierRoom& room() const { return room_; }
  // Copy elements of the offloaded buffer, raised or not, to `to` or from
  // `from`, which look as View(range) and are on the unit's device. CopyFrom
  // requires what TierRoom::WriteBytes does; CopyTo copies from memory, too.
  absl::Status CopyTo(Range range, const at::Tensor& to) const;
  absl::Status CopyFrom(Range range, const at::Tensor& from) {
    return room_.CopyFrom(range, from);
  }
  // Copies bytes [begin, begin + bytes) to `to`, from the host or disk if it is
  // offloaded. Blocking.
  absl::Status ReadBytes(int64_t begin, int64_t bytes, char* to) const;
  // Returns the elements, which the host may read and write after Wait, until
  // the buffer is next raised or copied. REQUIRES: on the host, and not raised.
  HostElements Host() const;

  // ---- what it is to hold next

  // Makes as much room again where it lies, on the host or on a disk, so that
  // its next values can be written there while it keeps the old ones, until
  // SwapNext exchanges the two. REQUIRES: elsewhere. ResourceExhausted. LOCAL.
  absl::Status MakeRoomForNext();
  const TierRoom& next() const { return next_; }  // undefined: there is none
  // Exchanges the values with the next ones. REQUIRES: next().defined(), all of
  // it written or being written; not raised.
  void SwapNext();
  // Frees the room for next values. REQUIRES: nobody writes there.
  void DropNext() { next_.Reset(); }

 private:
  const TieredState& state() const {
    static const TieredState& none = *new TieredState;
    return defined() ? *state_ : none;
  }

  std::shared_ptr<const TieredState> state_;  // null: undefined
  TierRoom room_, next_;
  SwapFuture storing_;
  bool leaves_ = false;  // a device's: to the host, between the calls
  FlatBuffer memory_;
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
  // As Commit, which TieredBuffer::FinishStore ends: the buffer is in memory
  // until then.
  absl::Status StartCommit() {
    return std::exchange(lowers_, false) ? buffer_->StartLower()
                                         : absl::OkStatus();
  }

 private:
  Raised(TieredBuffer* buffer, bool lowers)
      : buffer_(buffer), lowers_(lowers) {}
  TieredBuffer* buffer_;
  bool lowers_;
};

}  // namespace tessera
#endif  // OFFLOAD_TIERED_BUFFER_H_
