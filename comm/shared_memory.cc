#include "comm/shared_memory.h"

#include <sys/mman.h>

#include "base/status.h"
#include "comm/shm/arena.h"

namespace tessera {

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Map(int fd,
                                                                int64_t bytes) {
  TESSERA_ASSIGN_OR_RETURN(char* const readable,
                           shm::MapMemory(fd, bytes, /*writable=*/false));
  auto writable = shm::MapMemory(fd, bytes, /*writable=*/true);
  if (!writable.ok()) {
    munmap(readable, static_cast<size_t>(bytes));
    return writable.status();
  }
  return std::unique_ptr<SharedMemory>(
      new SharedMemory(readable, *writable, bytes));
}

SharedMemory::~SharedMemory() {
  munmap(readable_, static_cast<size_t>(bytes_));
  munmap(writable_, static_cast<size_t>(bytes_));
}

}  // namespace tessera
