// KeptBuffers: large buffers that were freed, for the next ones of their size.
//
// A fresh page costs the kernel more than a pass over it (0.3 us, 1.6 us in a
// virtual machine), and an engine of small units allocates the same sizes over
// and over. So a few MiB stay with the process; what is larger goes back to the
// system at once.
//
// Threads: any.
#ifndef BASE_KEPT_BUFFERS_H_
#define BASE_KEPT_BUFFERS_H_

#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace tessera {

class KeptBuffers {
 public:
  struct Buffer {
    void* data;
    int64_t bytes;
  };
  // Keeps at most so many bytes in all, and none of more than a quarter.
  explicit KeptBuffers(int64_t max_bytes) : max_bytes_(max_bytes) {}

  // Takes a buffer over. Returns what no longer has room, the longest kept
  // first: the caller frees it.
  std::vector<Buffer> Keep(Buffer buffer);
  // One of exactly so many bytes, the last one kept; null if there is none.
  void* Take(int64_t bytes);
  // All of them.
  std::vector<Buffer> Drop();

 private:
  const int64_t max_bytes_;
  absl::Mutex mutex_;
  std::vector<Buffer> kept_ ABSL_GUARDED_BY(mutex_);  // the oldest first
  int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace tessera
#endif  // BASE_KEPT_BUFFERS_H_
