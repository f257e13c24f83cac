// TieredBuffer: [n] elements of one state of one unit (its masters, or a moment
// of the optimizer), which lie in memory or on a disk.
//
//   in memory        a FlatBuffer, always: View
//   on a disk        an extent of the rank's swap file. A step streams it
//                    through a few small buffers (offload/update_stream.h);
//                    what else needs it raises it for a moment:
//
//     TESSERA_ASSIGN_OR_RETURN(Raised raised, Raised::Of(&buffer));
//     ... buffer.View() ...
//     return raised.Commit();  // where that has changed
//
// On a disk what nobody has written is zeros, and costs no write.
//
// Errors are those of the swap file, ResourceExhausted where memory or room on
// the disk is refused.
//
// Threads: none of its own; the caller orders the calls. ReadBytes of what lies
// on a disk may run beside Raise and Drop.
#ifndef OFFLOAD_TIERED_BUFFER_H_
#define OFFLOAD_TIERED_BUFFER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "offload/disk/swap_file.h"
#include "sharding/layout/flat_buffer.h"

namespace tessera {

class TieredBuffer {
 public:
  TieredBuffer() = default;
  // Zeros. `disk`: where they lie; null: in memory, on `device`. `what` is for
  // messages: "exp_avg of unit layers.3". REQUIRES: the device is the CPU where
  // there is a disk. LOCAL.
  static absl::StatusOr<TieredBuffer> Allocate(
      int64_t numel, at::ScalarType dtype, at::Device device, MemoryKind kind,
      std::shared_ptr<SwapFile> disk, std::string what);
  TieredBuffer(TieredBuffer&& other) noexcept;
  TieredBuffer& operator=(TieredBuffer&& other) noexcept;
  ~TieredBuffer() { Reset(); }
  void Reset();

  bool defined() const { return numel_ >= 0; }
  int64_t numel() const { return defined() ? numel_ : 0; }
  at::ScalarType dtype() const { return dtype_; }
  int64_t bytes() const { return numel() * item_bytes(); }
  int64_t item_bytes() const {
    return static_cast<int64_t>(c10::elementSize(dtype_));
  }
  bool on_disk() const { return disk_ != nullptr; }
  // Bytes of memory that it takes now.
  int64_t resident_bytes() const { return memory_.bytes(); }

  // ---- in memory, or raised

  bool in_memory() const { return memory_.defined(); }
  // [n]. REQUIRES: in_memory.
  const at::Tensor& View() const { return memory_.View(); }
  const FlatBuffer& memory() const { return memory_; }
  // The memory, given away; nothing is left. REQUIRES: not on a disk.
  FlatBuffer TakeMemory();
  // Reads what is on a disk; nothing to do where it is in memory.
  absl::Status Raise();
  // Back to the disk, if it has one: written if `changed`. After an error it is
  // in memory still.
  absl::Status Lower(bool changed);
  // Lower, where nothing has changed.
  void Drop();
  // `memory`, [n] of its dtype, becomes what it holds, and is on its way to the
  // disk; it is in memory until FinishStore, which waits. REQUIRES: on a disk,
  // and not in memory.
  void StartStore(FlatBuffer memory);
  absl::Status FinishStore();

  // ---- on a disk

  SwapFile* disk() const { return disk_.get(); }
  const SwapExtent& extent() const { return extent_; }
  const std::string& what() const { return what_; }
  // Nobody has written it: zeros, whatever the disk has there. Who writes all
  // of the extent says so.
  bool zeros() const { return zeros_; }
  void SetWritten() { zeros_ = false; }
  // Copies bytes [begin, begin + bytes) to `to`: of what lies on the disk if it
  // has one, raised or not. Blocking.
  absl::Status ReadBytes(int64_t begin, int64_t bytes, char* to) const;
  // To the disk. REQUIRES: on a disk, not raised; `begin` is a multiple of
  // kSwapAlignment; all of it if it is zeros. Blocking.
  absl::Status WriteBytes(int64_t begin, int64_t bytes, const void* from);

 private:
  std::shared_ptr<SwapFile> disk_;
  SwapExtent extent_;
  std::string what_;
  bool zeros_ = false;
  SwapFuture storing_;
  FlatBuffer memory_;
  int64_t numel_ = -1;
  at::ScalarType dtype_ = at::kFloat;
  at::Device device_ = at::kCPU;
  MemoryKind kind_ = MemoryKind::kOther;
};

// Raised from Of to its end, or to Commit. Nothing where it is in memory
// anyway; a null or undefined buffer is none.
class Raised {
 public:
  static absl::StatusOr<Raised> Of(TieredBuffer* buffer);
  Raised(Raised&& other) noexcept
      : buffer_(std::exchange(other.buffer_, nullptr)) {}
  Raised& operator=(Raised&&) = delete;
  ~Raised() {
    if (buffer_ != nullptr) buffer_->Drop();
  }
  // What has changed goes to the disk. After an error it is lost.
  absl::Status Commit() {
    return buffer_ == nullptr ? absl::OkStatus()
                              : buffer_->Lower(/*changed=*/true);
  }

 private:
  explicit Raised(TieredBuffer* buffer) : buffer_(buffer) {}
  TieredBuffer* buffer_;
};

}  // namespace tessera
#endif  // OFFLOAD_TIERED_BUFFER_H_
