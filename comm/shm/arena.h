// Arena: memory of this process that other ranks of the host can map.
//
//   memfd   [ used | free | used ....... | free ............ ]   sparse
//
// It is as long as the machine's memory, holds pages only where buffers are,
// and has no name: it is freed when the last process that maps it has ended,
// however it ended. Freed ranges give their pages back at once and are zero
// when used again. Core dumps leave it out, buffers and holes. Where the kernel
// keeps strict account of memory (base/memory/memfd.h) a buffer has its pages
// from the start, since there is no other way to be refused.
//
// Installed as the source of large buffers (base/memory/memory.h), so that what
// a collective works on lies where the others can read it.
//
// Threads: any.
#ifndef COMM_SHM_ARENA_H_
#define COMM_SHM_ARENA_H_

#include <cstdint>
#include <map>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "base/memory/memory.h"

namespace tessera::shm {

class Arena : public MemorySource {
 public:
  // Returns the process's arena, which the first call makes and installs. Never
  // destroyed. Unavailable where the kernel refuses, or cannot take freed pages
  // back.
  static absl::StatusOr<Arena*> Get();

  // Makes an arena over a memfd of `bytes`, which it takes over; not installed.
  // `takes_pages`: buffers get their pages when they are allocated. Unavailable
  // as Get. For tests.
  static absl::StatusOr<std::unique_ptr<Arena>> Over(int fd, int64_t bytes,
                                                     bool takes_pages);
  ~Arena() override;

  void* Allocate(int64_t bytes) override;  // null if there is no room
  void Free(void* data, int64_t bytes) override;
  bool Owns(const void* data) const override;
  int64_t resident_bytes() const override;

  int fd() const { return fd_; }
  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  Arena(int fd, char* data, int64_t bytes, bool takes_pages);
  static absl::StatusOr<Arena*> Make();
  char* TakeRange(int64_t bytes);

  const int fd_;
  char* const data_;
  const int64_t bytes_;
  const bool takes_pages_;
  absl::Mutex mutex_;
  std::map<int64_t, int64_t> free_ ABSL_GUARDED_BY(mutex_);  // begin -> bytes
};

}  // namespace tessera::shm
#endif  // COMM_SHM_ARENA_H_
