// Measures what saving and loading cost at least: plain writes of as many
// bytes, plain copies; and reads what the kernel says about a process's memory.
#ifndef BENCHMARKS_BARE_DISK_H_
#define BENCHMARKS_BARE_DISK_H_

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/status.h"
#include "benchmarks/workers.h"

namespace tessera {

// Memory from the kernel that nobody has touched yet; it returns to the kernel
// at the end.
class FreshMemory {
 public:
  static absl::StatusOr<FreshMemory> Map(int64_t bytes) {
    void* const at =
        mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return absl::ErrnoToStatus(errno, "mmap");
    return FreshMemory(static_cast<char*>(at), bytes);
  }
  FreshMemory(FreshMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}
  FreshMemory& operator=(FreshMemory&&) = delete;
  ~FreshMemory() {
    if (data_ != nullptr) munmap(data_, static_cast<size_t>(bytes_));
  }
  void AskForHugePages() const {
    (void)madvise(data_, static_cast<size_t>(bytes_), MADV_HUGEPAGE);
  }
  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  // Fills it with numbers that look like a model's to a compressor.
  void Fill() const {
    uint32_t random = 1;
    for (int64_t i = 0; i + 4 <= bytes_; i += 4) {
      random = random * 1664525u + 1013904223u;
      std::memcpy(data_ + i, &random, 4);
    }
  }

 private:
  FreshMemory(char* data, int64_t bytes) : data_(data), bytes_(bytes) {}
  char* data_;
  int64_t bytes_;
};

// Makes the host of a virtual machine back the memory that the kernel hands out
// next, as the files of a removed checkpoint do. Pages that the host must find
// first cost several times as much, and the first user pays.
inline absl::Status TouchAndFree(int64_t bytes) {
  TESSERA_ASSIGN_OR_RETURN(const FreshMemory memory, FreshMemory::Map(bytes));
  memory.Fill();
  return absl::OkStatus();
}

inline absl::Status FileErrno(const std::string& path) {
  return absl::ErrnoToStatus(errno, path);
}

// Writes a new file at `path` by calls of `call_bytes` and waits until it is on
// the disk; the folder too, as is needed to find it again.
inline absl::Status WritePlainly(const std::string& path,
                                 const FreshMemory& from, int64_t call_bytes) {
  const int fd =
      open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd < 0) return FileErrno(path);
  absl::Status status;
  for (int64_t at = 0; at < from.bytes() && status.ok();) {
    const int64_t bytes = std::min(call_bytes, from.bytes() - at);
    const int64_t written =
        pwrite(fd, from.data() + at, static_cast<size_t>(bytes), at);
    if (written < 0) status = FileErrno(path);
    at += written;
  }
  if (status.ok() && fsync(fd) != 0) status = FileErrno(path);
  close(fd);
  const std::string folder = std::filesystem::path(path).parent_path();
  const int of = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (of < 0) return FileErrno(folder);
  if (status.ok() && fsync(of) != 0) status = FileErrno(folder);
  close(of);
  return status;
}

inline void CopyPlainly(const FreshMemory& from, const FreshMemory& to,
                        Workers* workers) {
  workers->Run(from.bytes(), [&](int64_t begin, int64_t end) {
    std::memcpy(to.data() + begin, from.data() + begin,
                static_cast<size_t>(end - begin));
  });
}

// Reads all of a file by calls of the size of `to`.
inline absl::Status ReadPlainly(const std::string& path,
                                const FreshMemory& to) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return FileErrno(path);
  int64_t at = 0, got = 0;
  do {
    got = pread(fd, to.data(), static_cast<size_t>(to.bytes()), at);
    at += got;
  } while (got > 0);
  const absl::Status status = got < 0 ? FileErrno(path) : absl::OkStatus();
  close(fd);
  return status;
}

// Drops the files of `folder` from the system's caches, as far as they are on
// the disk, or reads all of them into the caches.
inline absl::Status SetCached(const std::string& folder, bool cached) {
  constexpr int64_t kBytes = 1 << 20;
  TESSERA_ASSIGN_OR_RETURN(const FreshMemory to, FreshMemory::Map(kBytes));
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string path = entry.path();
    if (cached) {
      TESSERA_RETURN_IF_ERROR(ReadPlainly(path, to));
      continue;
    }
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return FileErrno(path);
    const int error = posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
    if (error != 0) return absl::ErrnoToStatus(error, path);
  }
  return absl::OkStatus();
}

// Returns a line of /proc/self/status, in bytes: "VmRSS", or "VmHWM", the
// maximum since ResetPeakMemory.
inline absl::StatusOr<int64_t> MemoryLine(const std::string& name) {
  TESSERA_ASSIGN_OR_RETURN(const std::string text,
                           ReadWholeFile("/proc/self/status"));
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    if (!absl::ConsumePrefix(&line, absl::StrCat(name, ":"))) continue;
    line = absl::StripAsciiWhitespace(line);
    absl::ConsumeSuffix(&line, " kB");
    int64_t kib = 0;
    if (absl::SimpleAtoi(line, &kib)) return kib << 10;
  }
  return absl::UnavailableError(
      absl::StrCat("/proc/self/status has no ", name));
}

inline absl::Status ResetPeakMemory() {
  const int fd = open("/proc/self/clear_refs", O_WRONLY | O_CLOEXEC);
  if (fd < 0) return FileErrno("/proc/self/clear_refs");
  const bool done = write(fd, "5", 1) == 1;
  const absl::Status status =
      done ? absl::OkStatus() : FileErrno("/proc/self/clear_refs");
  close(fd);
  return status;
}

}  // namespace tessera
#endif  // BENCHMARKS_BARE_DISK_H_
