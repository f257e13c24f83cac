#include "checkpoint/copy_memory.h"

#include <errno.h>
#include <sys/mman.h>

#include <cstring>
#include <utility>

#include "base/memory/memory.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

constexpr int64_t kMiB = 1 << 20;

int64_t Held() { return MemoryLedger::Host().total().current_bytes; }

// Whether the process has the page that `at` is in.
bool IsMapped(const char* at) {
  const auto page = reinterpret_cast<uintptr_t>(at) / 4096 * 4096;
  unsigned char resident = 0;
  return mincore(reinterpret_cast<void*>(page), 1, &resident) == 0;
}

TEST(CopyMemoryTest, WhatWasWrittenGoesBackAndTheRestStays) {
  const int64_t before = Held();
  constexpr int64_t kBytes = 9 * kMiB + 64;
  absl::StatusOr<CopyMemory> memory = CopyMemory::Allocate(kBytes);
  TESSERA_ASSERT_OK(memory.status());
  char* const data = memory->data();
  std::memset(data, 7, kBytes);
  EXPECT_EQ(Held() - before, kBytes);

  memory->FreeUpTo(5 * kMiB);
  EXPECT_EQ(Held() - before, kBytes - 5 * kMiB);
  EXPECT_FALSE(IsMapped(data));
  EXPECT_FALSE(IsMapped(data + 4 * kMiB - 1));
  for (int64_t i = 5 * kMiB; i < kBytes; ++i) ASSERT_EQ(data[i], 7);

  CopyMemory moved = *std::move(memory);
  moved.FreeUpTo(3 * kMiB);  // is free already
  EXPECT_EQ(Held() - before, kBytes - 5 * kMiB);
  EXPECT_EQ(moved.data()[kBytes - 1], 7);
  moved.FreeUpTo(kBytes);
  EXPECT_EQ(Held(), before);
  EXPECT_FALSE(IsMapped(data + kBytes - 1));
}

TEST(CopyMemoryTest, ItsEndGivesAllBack) {
  const int64_t before = Held();
  char* data = nullptr;
  {
    absl::StatusOr<CopyMemory> memory = CopyMemory::Allocate(3 * kMiB);
    TESSERA_ASSERT_OK(memory.status());
    data = memory->data();
    EXPECT_TRUE(IsMapped(data));
  }
  EXPECT_FALSE(IsMapped(data));
  EXPECT_EQ(Held(), before);
}

TEST(CopyMemoryTest, BeyondTheLimitIsRefused) {
  MemoryLedger& ledger = MemoryLedger::Host();
  const int64_t limit = ledger.limit_bytes();
  ledger.SetLimit(Held() + kMiB);
  EXPECT_EQ(CopyMemory::Allocate(2 * kMiB).status().code(),
            absl::StatusCode::kResourceExhausted);
  TESSERA_EXPECT_OK(CopyMemory::Allocate(kMiB).status());
  ledger.SetLimit(limit);
}

}  // namespace
}  // namespace tessera
