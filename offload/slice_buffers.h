// SliceBuffers: the memory of an update stream (offload/update_stream.h), which
// slices of states go through on their way from a disk and back.
//
// Slices are numbered as they come, and take the buffers in turn: those below
// `computed` have been computed, those below `read` are being read or have
// been; those from `pushed` on belong to units that are predicted.
//
// Threads: one at a time.
#ifndef OFFLOAD_SLICE_BUFFERS_H_
#define OFFLOAD_SLICE_BUFFERS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/layout/layout.h"
#include "base/memory/memory.h"
#include "offload/disk/swap_file.h"
#include "offload/update_unit.h"

namespace tessera {

// A slice in memory.
struct SliceBuffer {
  // Starts to read the slice, states from `first_state` on.
  void StartRead(SwapFile* disk, size_t first_state);
  void StartWrite(SwapFile* disk);
  // Wait for all reads, or writes, and forget them.
  absl::Status AwaitRead();
  absl::Status AwaitWritten();
  bool IsWritten() const;
  // Copies the new values of a state to its memory at `all`.
  void CopyComputed(size_t state, char* all) const;

  CountedBuffer memory;
  std::shared_ptr<StreamUnit> unit;  // from its read to the end of its write
  // The unit and range of the new values in this buffer; guarded by the
  // stream's mutex.
  std::shared_ptr<StreamUnit> computed;
  Range slice;
  std::vector<char*> data;  // by state
  std::vector<SwapFuture> reads, writes;
};

class SliceBuffers {
 public:
  // Allocates `count` buffers for slices of `states` states of at most
  // `state_bytes`. `disk`: may be null where there are no states.
  // ResourceExhausted.
  static absl::StatusOr<std::unique_ptr<SliceBuffers>> Allocate(
      SwapFile* disk, int count, int64_t states, int64_t state_bytes);
  ~SliceBuffers();
  // Registers them with the disk, once others are gone.
  void Register();

  SliceBuffer& At(int64_t number) {
    return buffers_[static_cast<size_t>(number % count())];
  }
  bool HasRoom() const { return read - computed < count(); }
  // Returns the number of the first slice that may still be in memory.
  int64_t First() const { return std::max<int64_t>(0, read - count()); }
  const std::vector<SliceBuffer>& all() const { return buffers_; }
  int64_t bytes() const;

  int64_t read = 0, pushed = 0, computed = 0;

 private:
  explicit SliceBuffers(SwapFile* disk) : disk_(disk) {}
  int64_t count() const { return static_cast<int64_t>(buffers_.size()); }

  SwapFile* const disk_;
  std::vector<SliceBuffer> buffers_;
};

}  // namespace tessera
#endif  // OFFLOAD_SLICE_BUFFERS_H_
