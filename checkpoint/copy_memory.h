// CopyMemory: memory that is filled at once and given back from its beginning
// on, as what was copied gets written. From the kernel and back to it: nothing
// is kept with the process, and no other process maps it.
//
//   [ given back ..... | still there ......... ]
//                      FreeUpTo
//
// All of it is going to be touched, so the kernel is asked for huge pages: a
// page costs it more than the copy of one. Where its memory is full of files it
// may look for them long; who fills it as files are read asks for small ones.
//
// Threads: outside order.
#ifndef CHECKPOINT_COPY_MEMORY_H_
#define CHECKPOINT_COPY_MEMORY_H_

#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"

namespace tessera {

class CopyMemory {
 public:
  enum class Pages { kHuge, kSmall };
  // The ledger counts it as kOther. ResourceExhausted. 0 bytes: empty.
  static absl::StatusOr<CopyMemory> Allocate(int64_t bytes,
                                             Pages pages = Pages::kHuge);
  CopyMemory() = default;
  CopyMemory(CopyMemory&& other) noexcept { *this = std::move(other); }
  CopyMemory& operator=(CopyMemory&& other) noexcept;
  ~CopyMemory() { FreeUpTo(bytes_); }

  // Of the first byte, whether it is still there or not.
  char* data() const { return data_; }
  // Nobody reads bytes before `end` any more. The ledger counts at once; the
  // kernel gets whole huge pages, and the last one at the end.
  void FreeUpTo(int64_t end);

 private:
  CopyMemory(char* data, int64_t bytes) : data_(data), bytes_(bytes) {}

  char* data_ = nullptr;
  int64_t bytes_ = 0;
  int64_t freed_ = 0;     // of the ledger's
  int64_t unmapped_ = 0;  // of the mapping
};

}  // namespace tessera
#endif  // CHECKPOINT_COPY_MEMORY_H_
