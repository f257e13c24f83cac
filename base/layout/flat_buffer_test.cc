#include "base/layout/flat_buffer.h"

#include "base/status_matchers.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

TEST(FlatBufferTest, APartHasItsOwnBytes) {
  TESSERA_ASSERT_OK_AND_ASSIGN(
      FlatBuffer whole,
      FlatBuffer::Allocate(256, at::kFloat, at::kCPU, MemoryKind::kOptimizer));
  const FlatBuffer part = whole.Part({64, 192});
  const Range range{8, 16};
  EXPECT_EQ(part.Bytes(range).data_ptr(), whole.data(72));
  EXPECT_EQ(part.Bytes(range).data_ptr(), part.View(range).data_ptr());
  EXPECT_EQ(part.Bytes(range).numel(), 32);
}

}  // namespace
}  // namespace tessera
