// A store whose every answer is waited for a bounded time.
#include "comm/rendezvous/bounded_store.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"

namespace tessera {
namespace {

// Blocks while it is told to.
class FrozenStore : public c10d::HashStore {
 public:
  explicit FrozenStore(std::shared_ptr<absl::Mutex> frozen)
      : frozen_(std::move(frozen)) {}
  std::vector<std::vector<uint8_t>> multiGet(
      const std::vector<std::string>& keys) override {
    absl::MutexLock lock(frozen_.get());
    return c10d::HashStore::multiGet(keys);
  }

 private:
  const std::shared_ptr<absl::Mutex> frozen_;
};

TEST(BoundedStoreTest, IsSilentWhileTheStoreIsAndRecovers) {
  auto frozen = std::make_shared<absl::Mutex>();
  BoundedStore store(c10::make_intrusive<FrozenStore>(frozen),
                     absl::Milliseconds(100));
  ASSERT_TRUE(store.Set("a", "1"));
  EXPECT_EQ(store.Get({"a", "a"}), std::vector<std::string>({"1", "1"}));
  frozen->Lock();
  EXPECT_EQ(store.Get({"a"}), std::nullopt);
  EXPECT_TRUE(store.silent());
  const absl::Time begin = absl::Now();
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(store.Get({"a"}), std::nullopt);
  EXPECT_LT(absl::Now() - begin, absl::Seconds(20));  // not 1000 * 100 ms
  EXPECT_FALSE(store.Set("a", "2"));                  // queued
  frozen->Unlock();
  for (int i = 0; i < 500 && store.silent(); ++i) {
    absl::SleepFor(absl::Milliseconds(10));
  }
  EXPECT_EQ(store.Get({"a"}), std::vector<std::string>({"2"}));
}

TEST(BoundedStoreTest, EndsThoughTheStoreDoesNot) {
  auto frozen = std::make_shared<absl::Mutex>();
  frozen->Lock();
  {
    BoundedStore store(c10::make_intrusive<FrozenStore>(frozen),
                       absl::Milliseconds(50));
    EXPECT_EQ(store.Get({"a"}), std::nullopt);
  }
  frozen->Unlock();
}

}  // namespace
}  // namespace tessera
