#include "base/memory/memfd.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace tessera {
namespace {

absl::Status Refused(const char* what) {
  return absl::UnavailableError(
      absl::StrCat("shared memory: ", what, ": ", std::strerror(errno)));
}

// Neither the length nor the seals can change.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// A file that grows beyond the limit ends the process (SIGXFSZ).
absl::Status CheckLimit(int64_t bytes) {
  rlimit limit;
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 ||
      limit.rlim_cur >= static_cast<rlim_t>(bytes)) {
    return absl::OkStatus();
  }
  return absl::UnavailableError(absl::StrCat("shared memory: a file of ", bytes,
                                             " bytes is needed, the limit is ",
                                             limit.rlim_cur, " (`ulimit -f`)"));
}

absl::Status CheckLength(int fd, int64_t bytes) {
  struct stat info;
  if (fstat(fd, &info) != 0) return Refused("fstat");
  if (info.st_size != bytes) {
    return absl::UnavailableError(absl::StrCat(
        "shared memory: it has ", info.st_size, " bytes, expected ", bytes));
  }
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0) return Refused("fcntl");
  if ((seals & kSeals) == kSeals) return absl::OkStatus();
  return absl::UnavailableError("shared memory: its length is not sealed");
}

}  // namespace

bool StrictOvercommit(const std::string& root) {
  std::ifstream in(root + "/proc/sys/vm/overcommit_memory");
  int mode = 0;
  return in >> mode && mode == 2;
}

absl::Status TakePages(int fd, int64_t begin, int64_t bytes) {
  if (fallocate(fd, /*mode=*/0, begin, bytes) == 0) return absl::OkStatus();
  return Refused("fallocate");
}

absl::StatusOr<int> MakeMemfd(const char* name, int64_t bytes,
                              const std::string& root) {
  TESSERA_ASSIGN_OR_RETURN(const int fd, MakeSparseMemfd(name, bytes));
  if (bytes == 0 || !StrictOvercommit(root)) return fd;
  const absl::Status taken = TakePages(fd, 0, bytes);
  if (taken.ok()) return fd;
  close(fd);
  return taken;
}

absl::StatusOr<int> MakeSparseMemfd(const char* name, int64_t bytes) {
  TESSERA_RETURN_IF_ERROR(CheckLimit(bytes));
  const int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return Refused("memfd_create");
  absl::Status status;
  if (ftruncate(fd, bytes) != 0) {
    status = Refused("ftruncate");
  } else if (fcntl(fd, F_ADD_SEALS, kSeals) != 0) {
    status = Refused("fcntl");
  }
  if (status.ok()) return fd;
  close(fd);
  return status;
}

absl::StatusOr<char*> MapMemfd(int fd, int64_t bytes, bool writable) {
  // Past the end of the file an access would end the process (SIGBUS).
  TESSERA_RETURN_IF_ERROR(CheckLength(fd, bytes));
  void* data = mmap(nullptr, static_cast<size_t>(bytes),
                    writable ? PROT_READ | PROT_WRITE : PROT_READ,
                    MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (data == MAP_FAILED) return Refused("mmap");
  // A core dump reads every hole, which makes it a page; the heap is as long as
  // the machine's memory.
  if (madvise(data, static_cast<size_t>(bytes), MADV_DONTDUMP) != 0) {
    const absl::Status status = Refused("madvise");
    munmap(data, static_cast<size_t>(bytes));
    return status;
  }
  return static_cast<char*>(data);
}

}  // namespace tessera
