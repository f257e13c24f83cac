#include "comm/shared_memory.h"

#include <sys/mman.h>

#include "base/memory/memfd.h"
#include "base/status.h"

namespace tessera {

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Map(int fd,
                                                                int64_t bytes) {
  TESSERA_ASSIGN_OR_RETURN(char* const readable,
                           MapMemfd(fd, bytes, /*writable=*/false));
  auto writable = MapMemfd(fd, bytes, /*writable=*/true);
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
