// Memory without a name that processes may share: a Linux memfd. It is gone
// when the last process that holds or maps it has let go of it, however it
// ended.
#ifndef BASE_MEMORY_MEMFD_H_
#define BASE_MEMORY_MEMFD_H_

#include <cstdint>

#include "absl/status/statusor.h"

namespace tessera {

// A memfd of `bytes` zeros, closed on exec, whose length nobody can change. A
// page takes room when it is first written. Unavailable.
absl::StatusOr<int> MakeMemfd(const char* name, int64_t bytes);
// Maps all of it; `fd` stays the caller's, and may come from another process.
// Core dumps leave it out. Unavailable, also if `fd` is not what MakeMemfd
// makes of `bytes`.
absl::StatusOr<char*> MapMemfd(int fd, int64_t bytes, bool writable);

}  // namespace tessera
#endif  // BASE_MEMORY_MEMFD_H_
