#include "base/memory/heap.h"

#include <malloc.h>

#include <climits>
#include <cstdlib>

#include "absl/base/call_once.h"
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

// Gives back what is free, then sets both thresholds. Blocks of `mapped` bytes
// or more get mappings of their own, which are unmapped when they are freed.
// `top` bytes may stay free at the heap's end.
void SetThresholds(int mapped, int top) {
  if (SetByUser()) return;
  malloc_trim(0);
  mallopt(M_MMAP_THRESHOLD, mapped);
  mallopt(M_TRIM_THRESHOLD, top);
}

absl::once_flag returns, keeps;

}  // namespace

void ReturnFreedHeap() {
  absl::call_once(returns, [] { SetThresholds(128 << 10, 128 << 10); });
}

void KeepFreedHeap() {
  absl::call_once(returns, [] {});  // later calls of ReturnFreedHeap do nothing
  absl::call_once(keeps, [] {
    constexpr int kMost = 32 << 20;  // glibc accepts no more
    SetThresholds(kMost, INT_MAX);
  });
}

}  // namespace tessera
