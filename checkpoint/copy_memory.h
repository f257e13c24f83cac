// CopyMemory is memory that is filled at once and given back from its beginning
// on, as what was copied gets written. It comes from the kernel and returns
// there: the process keeps nothing, and no other process maps it.
//
//   [ given back ..... | still there ......... ]
//                      FreeUpTo
//
// All of it is going to be touched, so it asks the kernel for huge pages: a
// small page costs the kernel more than the copy of one. Where memory is full
// of cached files the kernel may search long for huge pages; a caller that
// fills it while files are read asks for small ones.
//
// Threads: the caller serializes the calls.
#ifndef CHECKPOINT_COPY_MEMORY_H_
#define CHECKPOINT_COPY_MEMORY_H_

#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"

namespace tessera {

class CopyMemory {
 public:
  enum class Pages { kHuge, kSmall };
  // Allocates `bytes`; 0 gives an empty one. The ledger counts it as kOther.
  // Returns ResourceExhausted.
  static absl::StatusOr<CopyMemory> Allocate(int64_t bytes,
                                             Pages pages = Pages::kHuge);
  CopyMemory() = default;
  CopyMemory(CopyMemory&& other) noexcept { *this = std::move(other); }
  CopyMemory& operator=(CopyMemory&& other) noexcept;
  ~CopyMemory() { FreeUpTo(bytes_); }

  // Returns the address of the first byte, whether it is still there or not.
  char* data() const { return data_; }
  // Frees the bytes before `end`, which nobody reads any more. The ledger
  // counts at once; the kernel gets whole huge pages, and the last one at the
  // end.
  void FreeUpTo(int64_t end);

 private:
  CopyMemory(char* data, int64_t bytes) : data_(data), bytes_(bytes) {}

  char* data_ = nullptr;
  int64_t bytes_ = 0;
  int64_t freed_ = 0;     // bytes subtracted from the ledger
  int64_t unmapped_ = 0;  // bytes of the mapping
};

}  // namespace tessera
#endif  // CHECKPOINT_COPY_MEMORY_H_
