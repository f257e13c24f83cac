#include "base/heap.h"

#include <malloc.h>

#include <climits>
#include <cstdlib>

#include "absl/strings/match.h"

namespace tessera {
namespace {

bool SetByUser() {
  const char* const tunables = std::getenv("GLIBC_TUNABLES");
  return std::getenv("MALLOC_TRIM_THRESHOLD_") != nullptr ||
         std::getenv("MALLOC_MMAP_THRESHOLD_") != nullptr ||
         std::getenv("MALLOC_MMAP_MAX_") != nullptr ||
         (tunables != nullptr && absl::StrContains(tunables, "glibc.malloc."));
}

bool Keep() {
  if (SetByUser()) return false;
  malloc_trim(0);
  constexpr int kMost = 32 << 20;  // glibc takes no more
  return mallopt(M_MMAP_THRESHOLD, kMost) == 1 &&
         mallopt(M_TRIM_THRESHOLD, INT_MAX) == 1;
}

}  // namespace

void KeepFreedHeap() {
  static const bool kept = Keep();
  (void)kept;
}

}  // namespace tessera
