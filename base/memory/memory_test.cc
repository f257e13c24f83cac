#include "base/memory/memory.h"

#include <errno.h>
#include <sys/mman.h>

#include <cstring>
#include <thread>
#include <vector>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr MemoryKind kKind = MemoryKind::kWorking;

// Every test leaves the global ledger as it found it: empty, without a limit.
class MemoryTest : public ::testing::Test {
 protected:
  MemoryTest() { Ledger().ResetPeak(); }
  ~MemoryTest() override {
    SetPoisonOnFree(false);
    Ledger().SetLimit(MemoryLedger::kNoLimit);
    EXPECT_EQ(Ledger().Report().total.current_bytes, 0);
  }
  static MemoryLedger& Ledger() { return MemoryLedger::Host(); }
  static MemoryUse Use() { return Ledger().Report()[kKind]; }

  static CountedBuffer Allocate(int64_t bytes, bool zeroed = false) {
    absl::StatusOr<CountedBuffer> buffer =
        AllocateCounted(bytes, kKind, zeroed);
    TESSERA_EXPECT_OK(buffer);
    return std::move(buffer).value();
  }
};

// The sizes lie around every border: empty, alignment, page, and the size from
// which on memory is mapped.
class BufferSizes : public MemoryTest,
                    public ::testing::WithParamInterface<int64_t> {};

TEST_P(BufferSizes, IsWritableAlignedCountedAndFreed) {
  const int64_t bytes = GetParam();
  {
    CountedBuffer buffer = Allocate(bytes);
    EXPECT_EQ(buffer.bytes(), bytes);
    EXPECT_EQ(buffer.kind(), kKind);
    EXPECT_EQ(buffer.data() == nullptr, bytes == 0);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % kBufferAlignment, 0);
    if (bytes > 0) std::memset(buffer.data(), 0xAB, bytes);
    EXPECT_EQ(Use().current_bytes, bytes);
  }
  EXPECT_EQ(Use().current_bytes, 0);
  EXPECT_EQ(Use().peak_bytes, bytes);
}

TEST_P(BufferSizes, ZeroedIsZeroEvenAfterDirtyMemory) {
  const int64_t bytes = GetParam();
  SetPoisonOnFree(true);
  for (int i = 0; i < 20; ++i) Allocate(bytes).Free();
  const CountedBuffer buffer = Allocate(bytes, /*zeroed=*/true);
  const char* data = buffer.data_as<char>();
  for (int64_t i = 0; i < bytes; ++i) ASSERT_EQ(data[i], 0) << i;
}

INSTANTIATE_TEST_SUITE_P(All, BufferSizes,
                         ::testing::Values(0, 1, 255, 256, 257, 4096,
                                           kMappedFromBytes - 1,
                                           kMappedFromBytes,
                                           kMappedFromBytes + 1, 1 << 20));

// Takes all mappings that this process may still have.
class NoMappings {
 public:
  NoMappings()
      : data_(static_cast<char*>(mmap(nullptr, kBytes, PROT_NONE,
                                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {
    int64_t at = kPage;
    while (at < kBytes && mprotect(data_ + at, kPage, PROT_READ) == 0) {
      at += 2 * kPage;
    }
    at_limit_ = errno == ENOMEM && at < kBytes;
  }
  ~NoMappings() { munmap(data_, kBytes); }
  bool at_limit() const { return at_limit_; }

 private:
  static constexpr int64_t kPage = 4096;
  static constexpr int64_t kBytes = kPage << 20;
  char* const data_;
  bool at_limit_ = false;
};

// Buffers in the middle of what is one mapping to the kernel.
TEST_F(MemoryTest, AtTheLimitOfMappingsBuffersCanBeFreed) {
#if __has_feature(thread_sanitizer)
  GTEST_SKIP() << "the sanitizer's own memory needs mappings";
#endif
  std::vector<CountedBuffer> buffers;
  for (int i = 0; i < 8; ++i) {
    buffers.push_back(Allocate(kMappedFromBytes));
    std::memset(buffers.back().data(), 1, kMappedFromBytes);
  }
  {
    const NoMappings no_mappings;
    ASSERT_TRUE(no_mappings.at_limit());
    for (int i = 1; i < 8; i += 2) buffers[i].Free();
    ReturnKept();
    EXPECT_EQ(Ledger().Report().kept_bytes, 0);
    for (int i = 1; i < 8; i += 2) {
      buffers[i] = Allocate(kMappedFromBytes, /*zeroed=*/true);
      for (int64_t at = 0; at < kMappedFromBytes; ++at) {
        ASSERT_EQ(buffers[i].data_as<char>()[at], 0);
      }
      std::memset(buffers[i].data(), 1, kMappedFromBytes);
    }
  }
  buffers.clear();
  ReturnKept();
}

TEST_F(MemoryTest, MovesLeaveTheSourceEmpty) {
  CountedBuffer a = Allocate(100);
  void* data = a.data();
  CountedBuffer b = std::move(a);
  EXPECT_EQ(b.data(), data);
  EXPECT_EQ(a.data(), nullptr);  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(a.bytes(), 0);
  CountedBuffer c = Allocate(50);
  c = std::move(b);
  EXPECT_EQ(c.data(), data);
  EXPECT_EQ(Use().current_bytes, 100);
  CountedBuffer& same = c;
  c = std::move(same);
  EXPECT_EQ(c.data(), data);
  c.Free();
  c.Free();
  EXPECT_EQ(Use().current_bytes, 0);
}

TEST_F(MemoryTest, NegativeSizeIsInvalid) {
  EXPECT_THAT(
      AllocateCounted(-1, kKind),
      StatusIs(absl::StatusCode::kInvalidArgument, "cannot allocate -1 bytes"));
}

TEST_F(MemoryTest, SystemRefusalNamesBytesKindAndWhatIsHeld) {
  const CountedBuffer held = Allocate(1000);
  EXPECT_THAT(AllocateCounted(int64_t{1} << 60, MemoryKind::kOptimizer),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       AllOf(HasSubstr("cannot allocate 1152921504606846976 "
                                       "bytes for optimizer: "),
                             HasSubstr("working 1000 (peak"),
                             HasSubstr("total 1000 (peak"))));
  EXPECT_EQ(Ledger().Report().total.current_bytes, 1000);
}

TEST_F(MemoryTest, LimitRefusesWithoutRaisingThePeak) {
  Ledger().SetLimit(1000);
  const CountedBuffer held = Allocate(600);
  EXPECT_THAT(AllocateCounted(401, MemoryKind::kGradients),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       AllOf(HasSubstr("401 bytes for gradients: the limit is "
                                       "1000; held now: "),
                             HasSubstr("working 600"))));
  EXPECT_EQ(Ledger().Report().total.peak_bytes, 600);
  EXPECT_EQ(Ledger().Report()[MemoryKind::kGradients].peak_bytes, 0);
  const CountedBuffer fits = Allocate(400);
}

TEST_F(MemoryTest, TotalPeakIsThePeakOfTheSum) {
  Ledger().Add(MemoryKind::kParameters, 10);
  Ledger().Add(MemoryKind::kGradients, 20);
  Ledger().Remove(MemoryKind::kParameters, 10);
  Ledger().Add(MemoryKind::kOptimizer, 15);
  const MemoryReport report = Ledger().Report();
  EXPECT_EQ(report.total.current_bytes, 35);
  EXPECT_EQ(report.total.peak_bytes, 35);  // the sum of the peaks is 45
  EXPECT_EQ(report[MemoryKind::kParameters].peak_bytes, 10);
  Ledger().Remove(MemoryKind::kGradients, 20);
  Ledger().Remove(MemoryKind::kOptimizer, 15);
}

TEST_F(MemoryTest, ResetPeakGoesToCurrent) {
  const CountedBuffer held = Allocate(100);
  Allocate(1000).Free();
  EXPECT_EQ(Use().peak_bytes, 1100);
  Ledger().ResetPeak();
  EXPECT_EQ(Use().peak_bytes, 100);
  EXPECT_EQ(Ledger().Report().total.peak_bytes, 100);
}

TEST_F(MemoryTest, ReportInWords) {
  MemoryLedger ledger;
  EXPECT_EQ(ledger.Report().ToString(), "total 0 (peak 0)");
  ledger.Add(MemoryKind::kGradients, 8);
  ledger.Add(MemoryKind::kOther, 2);
  ledger.Remove(MemoryKind::kGradients, 5);
  EXPECT_EQ(ledger.Report().ToString(),
            "gradients 3 (peak 8), other 2 (peak 2), total 5 (peak 10)");
}

TEST(MemoryLedgerDeath, RemovingMoreThanHeld) {
  MemoryLedger ledger;
  ledger.Add(MemoryKind::kWorking, 1);
  EXPECT_DEATH(ledger.Remove(MemoryKind::kWorking, 2), "working");
}

TEST_F(MemoryTest, ThreadsNeverExceedTheLimit) {
  constexpr int kThreads = 4;
  constexpr int64_t kBytes = 100;
  Ledger().SetLimit(kBytes * 2);
  std::vector<std::thread> threads;
  std::atomic<int> refused{0};
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 2000; ++i) {
        if (!AllocateCounted(kBytes, kKind).ok()) ++refused;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(Use().current_bytes, 0);
  EXPECT_LE(Ledger().Report().total.peak_bytes, kBytes * 2);
}

// Under address sanitizer the stale read itself is the error.
#if !__has_feature(address_sanitizer)
TEST_F(MemoryTest, PoisonFillsBeforeFree) {
  SetPoisonOnFree(true);
  CountedBuffer buffer = Allocate(8192, /*zeroed=*/true);
  // The heap may overwrite the front of a freed block; its middle it leaves.
  const volatile unsigned char* stale = buffer.data_as<unsigned char>() + 4096;
  buffer.Free();
  EXPECT_EQ(*stale, 0xFF);
}
#endif

TEST_F(MemoryTest, MappedBuffersCountWhenTouchedAndGoBackWhenFreed) {
  constexpr int64_t kBytes = 32 << 20;
  constexpr int64_t kSlack = 4 << 20;  // other pages of the process
  const auto anonymous_bytes = [] {
    const absl::StatusOr<ResidentMemory> memory = ReadResidentMemory();
    return memory.ok() ? memory->anonymous_bytes : -1;
  };
  const int64_t before = anonymous_bytes();
  if (before < 0) GTEST_SKIP() << "no smaps_rollup here";
  CountedBuffer buffer = Allocate(kBytes, /*zeroed=*/true);
  EXPECT_LT(anonymous_bytes(), before + kSlack);
  std::memset(buffer.data(), 1, kBytes);
  EXPECT_GE(anonymous_bytes(), before + kBytes - kSlack);
  buffer.Free();
  ReturnKept();
  EXPECT_LT(anonymous_bytes(), before + kSlack);
}

#if !__has_feature(address_sanitizer)
TEST_F(MemoryTest, WhatIsKeptIsGivenOutAgain) {
  ReturnKept();
  CountedBuffer first = Allocate(1 << 20);
  void* const data = first.data();
  first.Free();
  EXPECT_EQ(Ledger().Report().kept_bytes, 1 << 20);
  first = Allocate(1 << 20);
  EXPECT_EQ(first.data(), data);
  EXPECT_EQ(Ledger().Report().kept_bytes, 0);
  first.Free();
  ReturnKept();
  EXPECT_EQ(Ledger().Report().kept_bytes, 0);
}

TEST_F(MemoryTest, HeldAndKeptAreHardlyMoreThanThePeak) {
  constexpr int64_t kMib = 1 << 20;
  ReturnKept();
  CountedBuffer large = Allocate(96 * kMib), small = Allocate(32 * kMib);
  large.Free();
  EXPECT_EQ(Ledger().Report().kept_bytes, 96 * kMib);
  // 32 held + 96 kept + 8 wanted are 8 more than the peak; 9 wanted are too
  // much.
  Allocate(8 * kMib);
  EXPECT_EQ(Ledger().Report().kept_bytes, 104 * kMib);
  ReturnKept();
  large = Allocate(96 * kMib);
  large.Free();
  const CountedBuffer other = Allocate(9 * kMib);
  EXPECT_EQ(Ledger().Report().kept_bytes, 0);
  small.Free();
  EXPECT_EQ(Ledger().Report().kept_bytes, 32 * kMib);
  Ledger().ResetPeak();
  Allocate(32 * kMib).Free();
  EXPECT_EQ(Ledger().Report().kept_bytes, 32 * kMib);
  ReturnKept();
}

TEST_F(MemoryTest, WhatNobodyAsksForGoesBack) {
  ReturnKept();
  Allocate(1 << 20).Free();
  for (int i = 0; i < 3; ++i) EndKeptPeriod();
  EXPECT_EQ(Ledger().Report().kept_bytes, 1 << 20);
  EndKeptPeriod();
  EXPECT_EQ(Ledger().Report().kept_bytes, 0);
}
#endif

TEST(ResidentMemory, FiguresAreOrdered) {
  const absl::StatusOr<ResidentMemory> memory = ReadResidentMemory();
  if (!memory.ok()) GTEST_SKIP() << memory.status();
  EXPECT_GT(memory->anonymous_bytes, 0);
  EXPECT_GT(memory->private_dirty_bytes, 0);
  EXPECT_LE(memory->pss_bytes, memory->rss_bytes);
  EXPECT_LE(memory->anonymous_bytes, memory->rss_bytes);
  TESSERA_ASSERT_OK_AND_ASSIGN(const int64_t resident_bytes, ResidentBytes());
  EXPECT_GT(resident_bytes, 0);
}

}  // namespace
}  // namespace tessera
