// PeerMemory: device memory that the ranks of one host share. Each rank has two
// slots, which only it writes and all others can read, and marks that order
// streams of different processes.
//
//   rank 0  [ slot 0 | slot 1 ]  written, read of either slot
//   rank 1  [ slot 0 | slot 1 ]  written, read of either slot
//
// All operations are given to one stream of this rank and return at once.
// comm/cuda_ipc/slot_exchange.h decides which marks are awaited when.
#ifndef COMM_CUDA_IPC_PEER_MEMORY_H_
#define COMM_CUDA_IPC_PEER_MEMORY_H_

#include <cstdint>

#include "absl/status/status.h"

namespace tessera {

class PeerMemory {
 public:
  static constexpr int kSlots = 2;
  // What a rank marks for slots of one number: that it has written its own, or
  // that it has read the others'.
  enum class Mark { kWritten = 0, kRead = 1 };
  static constexpr int kMarks = 2;

  virtual ~PeerMemory() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  virtual int64_t slot_bytes() const = 0;

  // Sets this rank's mark after all that the stream has been given so far.
  virtual absl::Status Record(Mark mark, int slot) = 0;
  // Orders the stream's later work after the mark of `rank` as it is when this
  // is called; later records of it change nothing. A mark that was never
  // recorded is not waited for.
  virtual absl::Status Await(int rank, Mark mark, int slot) = 0;

  // Copies `bytes` from this rank's memory to its slot, from byte `at` on.
  virtual absl::Status Put(const void* from, int slot, int64_t at,
                           int64_t bytes) = 0;
  // Copies `bytes` from the slot of `rank`, from byte `at` on, to this rank's
  // memory.
  virtual absl::Status Get(int rank, int slot, int64_t at, void* to,
                           int64_t bytes) = 0;
  // Copies within this rank's memory, between places that do not overlap.
  virtual absl::Status Copy(const void* from, void* to, int64_t bytes) = 0;

  // Ends the stream's waits for other ranks, if possible. Any thread.
  virtual void Abort() {}
};

}  // namespace tessera
#endif  // COMM_CUDA_IPC_PEER_MEMORY_H_
