#include "comm/shm/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/memory/memfd.h"
#include "base/status.h"

namespace tessera::shm {
namespace {

constexpr int64_t kPageBytes = 4096;

int64_t WholePages(int64_t bytes) {
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

// Makes a range a hole, which reads as zeros.
bool GiveBack(int fd, int64_t begin, int64_t length) {
  return fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, begin,
                   length) == 0;
}

}  // namespace

Arena::Arena(int fd, char* data, int64_t bytes, bool takes_pages)
    : fd_(fd), data_(data), bytes_(bytes), takes_pages_(takes_pages) {
  free_.emplace(0, bytes);
}

Arena::~Arena() {
  munmap(data_, static_cast<size_t>(bytes_));
  close(fd_);
}

absl::StatusOr<Arena*> Arena::Make() {
  const int64_t bytes =
      int64_t{sysconf(_SC_PHYS_PAGES)} * int64_t{sysconf(_SC_PAGESIZE)};
  TESSERA_ASSIGN_OR_RETURN(const int fd,
                           MakeSparseMemfd("tessera-heap", bytes));
  TESSERA_ASSIGN_OR_RETURN(std::unique_ptr<Arena> arena,
                           Over(fd, bytes, StrictOvercommit()));
  SetMemorySource(arena.get());
  return arena.release();
}

absl::StatusOr<std::unique_ptr<Arena>> Arena::Over(int fd, int64_t bytes,
                                                   bool takes_pages) {
  if (!GiveBack(fd, 0, kPageBytes)) {
    const int error = errno;
    close(fd);
    return absl::UnavailableError(
        absl::StrCat("shared memory: fallocate: ", std::strerror(error)));
  }
  auto data = MapMemfd(fd, bytes, /*writable=*/true);
  if (!data.ok()) {
    close(fd);
    return data.status();
  }
  return std::unique_ptr<Arena>(new Arena(fd, *data, bytes, takes_pages));
}

absl::StatusOr<Arena*> Arena::Get() {
  static const absl::StatusOr<Arena*>* const arena =
      new absl::StatusOr<Arena*>(Make());
  return *arena;
}

void* Arena::Allocate(int64_t bytes) {
  char* const data = TakeRange(bytes);
  if (data == nullptr || !takes_pages_) return data;
  if (TakePages(fd_, data - data_, WholePages(bytes)).ok()) return data;
  Free(data, bytes);
  return nullptr;
}

char* Arena::TakeRange(int64_t bytes) {
  const int64_t wanted = WholePages(bytes);
  absl::MutexLock lock(&mutex_);
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const auto [begin, length] = *it;
    if (length < wanted) continue;
    free_.erase(it);
    if (length > wanted) free_.emplace(begin + wanted, length - wanted);
    return data_ + begin;
  }
  return nullptr;
}

void Arena::Free(void* data, int64_t bytes) {
  int64_t begin = static_cast<char*>(data) - data_;
  int64_t length = WholePages(bytes);
  // Make has checked that the kernel can do this.
  TESSERA_CHECK(GiveBack(fd_, begin, length)) << std::strerror(errno);
  absl::MutexLock lock(&mutex_);
  auto next = free_.lower_bound(begin);
  if (next != free_.end() && next->first == begin + length) {
    length += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == begin) {
      previous->second += length;
      return;
    }
  }
  free_.emplace(begin, length);
}

bool Arena::Owns(const void* data) const {
  return data >= data_ && data < data_ + bytes_;
}

int64_t Arena::resident_bytes() const {
  struct stat info;
  return fstat(fd_, &info) == 0 ? info.st_blocks * 512 : 0;
}

}  // namespace tessera::shm
