// PeerMemory: memory of their devices that the ranks of one host have in
// common: each rank has two slots, which it alone writes and all others can
// read; and marks by which streams of different processes come after each
// other.
//
//   rank 0  [ slot 0 | slot 1 ]  written, read of either slot
//   rank 1  [ slot 0 | slot 1 ]  written, read of either slot
//
// Everything here is given to one stream of this rank and returns at once.
// Which marks are to be awaited when is comm/cuda_ipc/slot_exchange.h's matter.
#ifndef COMM_CUDA_IPC_PEER_MEMORY_H_
#define COMM_CUDA_IPC_PEER_MEMORY_H_

#include <cstdint>

#include "absl/status/status.h"

namespace tessera {

class PeerMemory {
 public:
  static constexpr int kSlots = 2;
  // What a rank says of slots of one number: that it has written its own; that
  // it has read the others'.
  enum class Mark { kWritten = 0, kRead = 1 };
  static constexpr int kMarks = 2;

  virtual ~PeerMemory() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  virtual int64_t slot_bytes() const = 0;

  // The own mark now stands for all that the stream has been given.
  virtual absl::Status Record(Mark mark, int slot) = 0;
  // What the stream is given from now on comes after what the mark of `rank`
  // stood for when this is called; later records of it change nothing. A mark
  // that was never recorded stands for nothing.
  virtual absl::Status Await(int rank, Mark mark, int slot) = 0;

  // Copies `bytes` from this rank's memory to the own slot, from byte `at` on.
  virtual absl::Status Put(const void* from, int slot, int64_t at,
                           int64_t bytes) = 0;
  // The other way round, from the slot of `rank`.
  virtual absl::Status Get(int rank, int slot, int64_t at, void* to,
                           int64_t bytes) = 0;
  // Copies within this rank's memory, between places that do not overlap.
  virtual absl::Status Copy(const void* from, void* to, int64_t bytes) = 0;

  // The stream no longer waits for other ranks, if that can be. Any thread.
  virtual void Abort() {}
};

}  // namespace tessera
#endif  // COMM_CUDA_IPC_PEER_MEMORY_H_
