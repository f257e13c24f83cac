// Makes memory without a name that processes may share: a Linux memfd. It is
// gone when the last process that holds or maps it has let go of it, however
// that process ended.
#ifndef BASE_MEMORY_MEMFD_H_
#define BASE_MEMORY_MEMFD_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tessera {

// Returns whether the kernel accounts memory strictly (vm.overcommit_memory is
// 2). Under strict accounting a first write to a page of a memfd ends the
// process (SIGBUS) if no memory is left, so pages have to be taken before.
// `root` is put before /proc, for tests. LOCAL.
bool StrictOvercommit(const std::string& root = "");

// Makes a memfd of `bytes` zeros, closed on exec, whose length nobody can
// change. A page takes memory when it is first written; under strict accounting
// all pages do now. Returns Unavailable.
absl::StatusOr<int> MakeMemfd(const char* name, int64_t bytes,
                              const std::string& root = "");
// Makes a memfd as MakeMemfd does, but no page takes memory now: under strict
// accounting call TakePages before pages are written.
absl::StatusOr<int> MakeSparseMemfd(const char* name, int64_t bytes);
// Takes memory for [begin, begin + bytes) now. Returns Unavailable; then
// nothing was taken.
absl::Status TakePages(int fd, int64_t begin, int64_t bytes);
// Maps the whole memfd; `fd` stays the caller's and may come from another
// process. Core dumps leave it out. Returns Unavailable, also if `fd` is not
// what MakeMemfd makes of `bytes`.
absl::StatusOr<char*> MapMemfd(int fd, int64_t bytes, bool writable);

}  // namespace tessera
#endif  // BASE_MEMORY_MEMFD_H_
