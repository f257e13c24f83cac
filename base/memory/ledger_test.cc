#include "base/memory/ledger.h"

#include <optional>
#include <string>
#include <vector>

#include "base/memory/ledger_watch.h"
#include "base/memory/memory.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr MemoryKind kKind = MemoryKind::kWorking;

// Each test has devices of its own.
MemoryLedger& Device(int index) {
  const std::string test =
      ::testing::UnitTest::GetInstance()->current_test_info()->name();
  return MemoryLedger::Of(test + ":" + std::to_string(index));
}

TEST(DeviceLedger, IsOneForEachDevice) {
  EXPECT_EQ(&Device(0), &Device(0));
  EXPECT_NE(&Device(0), &Device(1));
  EXPECT_EQ(Device(1).device(), "IsOneForEachDevice:1");
  EXPECT_FALSE(Device(0).of_host());
  EXPECT_EQ(&MemoryLedger::Of("cpu"), &MemoryLedger::Host());
  EXPECT_TRUE(MemoryLedger::Host().of_host());
  EXPECT_EQ(MemoryLedger::Host().device(), "cpu");
}

TEST(DeviceLedger, WhatOneHoldsIsNotAnothers) {
  Device(0).Add(kKind, 100);
  EXPECT_EQ(Device(0).total().current_bytes, 100);
  EXPECT_EQ(Device(0).Report()[kKind].peak_bytes, 100);
  EXPECT_EQ(Device(1).total().current_bytes, 0);
  EXPECT_EQ(MemoryLedger::Host().total().current_bytes, 0);
  Device(0).Remove(kKind, 100);
}

TEST(DeviceLedger, ALimitBindsItsDeviceAlone) {
  const MemoryLimit limit(&Device(0), 1000, "a key");
  EXPECT_FALSE(Device(0).TryAdd(kKind, 1001));
  EXPECT_TRUE(Device(1).TryAdd(kKind, 1001));
  TESSERA_EXPECT_OK(AllocateCounted(1001, kKind));
  Device(1).Remove(kKind, 1001);
}

// A limit may come when more is held already.
TEST(DeviceLedger, NothingIsNeverRefused) {
  Device(0).Add(kKind, 1000);
  const MemoryLimit limit(&Device(0), 100, "a key");
  EXPECT_TRUE(Device(0).TryAdd(kKind, 0));
  TESSERA_EXPECT_OK(Device(0).Claim(kKind, 0, "nothing"));
  EXPECT_FALSE(Device(0).TryAdd(kKind, 1));
  Device(0).Remove(kKind, 1000);
}

TEST(DeviceLedger, DeviceBytesRefuseNoHostBufferNorTheOtherWayRound) {
  const MemoryLimit of_host(&MemoryLedger::Host(), 1000, "a key");
  ASSERT_TRUE(Device(0).TryAdd(kKind, 5000));
  absl::StatusOr<CountedBuffer> buffer = AllocateCounted(900, kKind);
  TESSERA_EXPECT_OK(buffer);
  EXPECT_THAT(AllocateCounted(200, kKind),
              StatusIs(absl::StatusCode::kResourceExhausted));
  const MemoryLimit of_device(&Device(0), 5500, "a key");
  EXPECT_TRUE(Device(0).TryAdd(kKind, 500));
  Device(0).Remove(kKind, 5500);
}

#if !__has_feature(address_sanitizer)
// The limit of kept freed buffers is a share of what the host held.
TEST(DeviceLedger, DeviceBytesAreNoRoomForFreedHostBuffers) {
  constexpr int64_t kMiB = 1 << 20;
  ReturnKept();
  MemoryLedger::Host().ResetPeak();
  Device(0).Add(kKind, 64 * kMiB);
  Device(0).Remove(kKind, 64 * kMiB);
  TESSERA_ASSERT_OK_AND_ASSIGN(CountedBuffer first,
                               AllocateCounted(8 * kMiB, kKind));
  first.Free();
  TESSERA_ASSERT_OK_AND_ASSIGN(CountedBuffer second,
                               AllocateCounted(7 * kMiB, kKind));
  EXPECT_EQ(KeptBytes(), 0);  // 15 MiB would be held and kept
  second.Free();
  ReturnKept();
}
#endif

TEST(DeviceLedger, RefusalsSayWhoseLimitWhatIsHeldAndWhatToChange) {
  Device(0).Add(MemoryKind::kOptimizer, 400);
  const MemoryLimit limit(&Device(0), 1000, "the.key: raise it");
  EXPECT_THAT(
      Device(0).Claim(kKind, 601, "a copy"),
      StatusIs(absl::StatusCode::kResourceExhausted,
               AllOf(HasSubstr("cannot allocate 601 bytes for a copy: the "
                               "limit of RefusalsSayWhoseLimitWhatIsHeldAndWhat"
                               "ToChange:0 is 1000 (the.key: raise it)"),
                     HasSubstr("; held now: optimizer 400"))));
  EXPECT_EQ(Device(0).total().peak_bytes, 400);
  TESSERA_EXPECT_OK(Device(0).Claim(kKind, 600, "a copy"));
  Device(0).Remove(kKind, 600);
  Device(0).Remove(MemoryKind::kOptimizer, 400);
}

TEST(DeviceLedger, TheLeastLimitCountsUntilItGoes) {
  MemoryLedger& ledger = Device(0);
  ledger.SetLimit(300);
  {
    const MemoryLimit large(&ledger, 500, "large");
    EXPECT_EQ(ledger.limit_bytes(), 300);
    std::optional<MemoryLimit> small;
    small.emplace(&ledger, 100, "small");
    EXPECT_EQ(ledger.limit_bytes(), 100);
    {
      const NoMemoryLimit unlimited(&ledger);
      EXPECT_EQ(ledger.limit_bytes(), MemoryLedger::kNoLimit);
      EXPECT_EQ(Device(1).limit_bytes(), MemoryLedger::kNoLimit);
      EXPECT_EQ(ledger.least_memory_limit(), 100);
    }
    EXPECT_EQ(ledger.limit_bytes(), 100);
    small.reset();
    EXPECT_EQ(ledger.limit_bytes(), 300);
    ledger.SetLimit(MemoryLedger::kNoLimit);
    EXPECT_EQ(ledger.limit_bytes(), 500);
    ledger.SetLimit(400);
    EXPECT_EQ(ledger.least_memory_limit(), 500);
    ledger.SetLimit(MemoryLedger::kNoLimit);
  }
  EXPECT_EQ(ledger.least_memory_limit(), MemoryLedger::kNoLimit);
  EXPECT_EQ(ledger.limit_bytes(), MemoryLedger::kNoLimit);
}

class Watch final : public LedgerWatch {
 public:
  void Changed(const MemoryLedger& ledger, int64_t change) override {
    seen.push_back(ledger.device() + " " + std::to_string(change));
  }
  void Refused(const MemoryLedger& ledger) override {
    seen.push_back(ledger.device() + " refused");
  }
  std::vector<std::string> seen;
};

TEST(DeviceLedger, TheWatchIsToldWhose) {
  Watch watch;
  SetLedgerWatch(&watch);
  MemoryLedger nobodys;
  nobodys.Add(kKind, 1);
  Device(0).Add(kKind, 5);
  Device(0).Remove(kKind, 5);
  const MemoryLimit limit(&Device(0), 1, "a key");
  EXPECT_FALSE(Device(0).Claim(kKind, 2, "more").ok());
  { auto buffer = AllocateCounted(3, kKind); }
  SetLedgerWatch(nullptr);
  EXPECT_THAT(watch.seen,
              ElementsAre("TheWatchIsToldWhose:0 5", "TheWatchIsToldWhose:0 -5",
                          "TheWatchIsToldWhose:0 refused", "cpu 3", "cpu -3"));
}

}  // namespace
}  // namespace tessera
