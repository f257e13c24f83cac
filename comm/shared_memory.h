// SharedMemory: one piece of memory that all ranks of a host share. Each of
// them maps it twice: to read, and to write. It has no name, and is freed with
// the last process that maps it, however that ends.
//
// Made by Communicator::ShareMemory. Zeros at first; a page takes room when it
// is first written (where memory is accounted strictly, from the start).
#ifndef COMM_SHARED_MEMORY_H_
#define COMM_SHARED_MEMORY_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"

namespace tessera {

class SharedMemory {
 public:
  // Maps all of a memfd of base/memory/memfd.h, which stays the caller's.
  // Unavailable, also if it has not `bytes`.
  static absl::StatusOr<std::unique_ptr<SharedMemory>> Map(int fd,
                                                           int64_t bytes);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // A write to the first faults.
  char* readable() const { return readable_; }
  char* writable() const { return writable_; }
  int64_t bytes() const { return bytes_; }

 private:
  SharedMemory(char* readable, char* writable, int64_t bytes)
      : readable_(readable), writable_(writable), bytes_(bytes) {}

  char* const readable_;
  char* const writable_;
  const int64_t bytes_;
};

}  // namespace tessera
#endif  // COMM_SHARED_MEMORY_H_
