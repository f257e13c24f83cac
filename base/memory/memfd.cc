#include "base/memory/memfd.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace tessera {
namespace {

absl::Status Refused(const char* what) {
  return absl::UnavailableError(
      absl::StrCat("shared memory: ", what, ": ", std::strerror(errno)));
}

}  // namespace

absl::StatusOr<int> MakeMemfd(const char* name, int64_t bytes) {
  const int fd = memfd_create(name, MFD_CLOEXEC);
  if (fd < 0) return Refused("memfd_create");
  if (ftruncate(fd, bytes) != 0) {
    const absl::Status status = Refused("ftruncate");
    close(fd);
    return status;
  }
  return fd;
}

absl::StatusOr<char*> MapMemfd(int fd, int64_t bytes, bool writable) {
  void* data = mmap(nullptr, static_cast<size_t>(bytes),
                    writable ? PROT_READ | PROT_WRITE : PROT_READ,
                    MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (data == MAP_FAILED) return Refused("mmap");
  return static_cast<char*>(data);
}

}  // namespace tessera
