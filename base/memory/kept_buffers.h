// KeptBuffers keeps large freed buffers for the next allocations of their size.
//
// A fresh page costs the kernel more than a pass over it (0.3 us, 1.6 us in a
// virtual machine), and an engine allocates the same sizes in every step. The
// caller decides how much may be kept; what was not taken again for kPeriods
// periods (steps) goes back to the system.
//
// Threads: any.
#ifndef BASE_MEMORY_KEPT_BUFFERS_H_
#define BASE_MEMORY_KEPT_BUFFERS_H_

#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace tessera {

class KeptBuffers {
 public:
  // Two engines that take turns end a period each.
  static constexpr int64_t kPeriods = 4;

  struct Buffer {
    void* data;
    int64_t bytes;
  };

  // Takes a buffer over while no more than `max_bytes` are kept in all. Returns
  // the buffers that no longer have room, the longest kept first; the caller
  // frees them.
  std::vector<Buffer> Keep(Buffer buffer, int64_t max_bytes);
  // Returns a buffer of exactly `bytes`, the last one kept; null if there is
  // none.
  void* Take(int64_t bytes);
  // Gives up the longest kept buffers until no more than `max_bytes` are left.
  std::vector<Buffer> Shrink(int64_t max_bytes);
  // Ends a period. Returns the buffers that were kept kPeriods ago.
  std::vector<Buffer> EndPeriod();

  int64_t bytes() const;

 private:
  struct Kept {
    Buffer buffer;
    int64_t period;
  };
  std::vector<Buffer> TakeOldest(size_t count)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable absl::Mutex mutex_;
  std::vector<Kept> kept_ ABSL_GUARDED_BY(mutex_);  // the oldest first
  int64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t period_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace tessera
#endif  // BASE_MEMORY_KEPT_BUFFERS_H_
