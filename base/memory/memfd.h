// Memory without a name that processes may share: a Linux memfd. It is gone
// when the last process that holds or maps it has let go of it, however it
// ended.
#ifndef BASE_MEMORY_MEMFD_H_
#define BASE_MEMORY_MEMFD_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tessera {

// Does the kernel keep strict account of memory (vm.overcommit_memory is 2)? A
// page of a memfd that is first written where none may be had any more then
// ends the process (SIGBUS): they have to be taken before. `root` stands before
// /proc, for tests. LOCAL.
bool StrictOvercommit(const std::string& root = "");

// A memfd of `bytes` zeros, closed on exec, whose length nobody can change. A
// page takes room when it is first written; under strict account all do now.
// Unavailable.
absl::StatusOr<int> MakeMemfd(const char* name, int64_t bytes,
                              const std::string& root = "");
// The same, but no page takes room: under strict account TakePages must have
// taken those that are written.
absl::StatusOr<int> MakeSparseMemfd(const char* name, int64_t bytes);
// Makes room for [begin, begin + bytes), now. Unavailable; then nothing was
// taken.
absl::Status TakePages(int fd, int64_t begin, int64_t bytes);
// Maps all of it; `fd` stays the caller's, and may come from another process.
// Core dumps leave it out. Unavailable, also if `fd` is not what
// MakeMemfd makes of `bytes`.
absl::StatusOr<char*> MapMemfd(int fd, int64_t bytes, bool writable);

}  // namespace tessera
#endif  // BASE_MEMORY_MEMFD_H_
