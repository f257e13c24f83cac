#include "base/heap.h"

#include <sys/resource.h>

#include <cstdlib>
#include <cstring>

#include "gtest/gtest.h"

namespace tessera {
namespace {

int64_t PageFaults() {
  rusage usage;
  EXPECT_EQ(getrusage(RUSAGE_SELF, &usage), 0);
  return usage.ru_minflt;
}

// As a step's activations: all allocated, all freed.
void Step() {
  constexpr size_t kBytes = 4 << 20;
  void* blocks[4];
  for (void*& block : blocks) {
    block = std::malloc(kBytes);
    std::memset(block, 1, kBytes);
  }
  for (void* block : blocks) std::free(block);
}

TEST(HeapTest, FreedBlocksStayForTheNextStep) {
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
  GTEST_SKIP() << "a sanitizer's malloc";
#endif
  KeepFreedHeap();
  KeepFreedHeap();
  Step();
  const int64_t before = PageFaults();
  Step();
  EXPECT_LT(PageFaults() - before, 256);  // of 4096 pages
}

}  // namespace
}  // namespace tessera
