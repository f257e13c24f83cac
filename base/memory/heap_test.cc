#include "base/memory/heap.h"

#include <malloc.h>
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

constexpr size_t kBytes = 4 << 20;

// All written to. What nobody sees the compiler would leave out.
void* Allocate() {
  void* volatile block = std::malloc(kBytes);
  std::memset(block, 1, kBytes);
  return block;
}

// Allocates all blocks and then frees all, as a step does with activations.
void Step() {
  void* blocks[4];
  for (void*& block : blocks) block = Allocate();
  for (void* block : blocks) std::free(block);
}

// Whether a block of a step is mapped by itself, to be unmapped when it is
// freed.
bool IsMapped() {
  const size_t before = mallinfo2().hblks;
  void* block = Allocate();
  const size_t with = mallinfo2().hblks;
  std::free(block);
  return with > before;
}

TEST(HeapTest, FreedBlocksGoBackAndLaterStay) {
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
  GTEST_SKIP() << "a sanitizer's malloc";
#endif
  Step();  // glibc learns
  EXPECT_FALSE(IsMapped());
  ReturnFreedHeap();
  EXPECT_TRUE(IsMapped());
  Step();
  EXPECT_TRUE(IsMapped());
  KeepFreedHeap();
  KeepFreedHeap();
  EXPECT_FALSE(IsMapped());
  ReturnFreedHeap();  // too late
  Step();
  const int64_t before = PageFaults();
  Step();
  EXPECT_LT(PageFaults() - before, 256);  // of 4096 pages
}

}  // namespace
}  // namespace tessera
