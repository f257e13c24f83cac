// Memory of the CPU that goes to a disk and comes back. Of devices:
// tests/offload/activations_test.cc.
#include "offload/activation_store.h"

#include <torch/torch.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/disk/swap_file.h"
#include "offload/disk/swap_test_util.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Stored = ActivationStore::Stored;

constexpr int64_t kNumel = 40'000;
constexpr int64_t kBytes = kNumel * 4;
constexpr int64_t kLeast = 64 << 10;

class ActivationStoreTest : public SwapFileTest {
 protected:
  void SetUp() override {
    file_ = Open();
    store_ = ActivationStore::Create(file_, kLeast);
  }
  static at::Tensor Values(int64_t seed, int64_t numel = kNumel) {
    torch::manual_seed(static_cast<uint64_t>(seed));
    return torch::randn({numel});
  }
  Stored Put(ActivationStore::Group *group, const at::Tensor &tensor) {
    auto stored =
        group->Put(tensor.storage(), static_cast<int64_t>(tensor.nbytes()),
                   tensor._version(), absl::StrCat("activation ", count_++));
    TESSERA_EXPECT_OK(stored);
    return *std::move(stored);
  }
  void ExpectValues(const Stored &stored, int64_t seed) {
    auto storage = store_->Get(stored);
    TESSERA_ASSERT_OK(storage);
    const at::Tensor values = Values(seed);
    ASSERT_EQ(storage->nbytes(), values.nbytes());
    EXPECT_EQ(std::memcmp(storage->data(), values.data_ptr(), values.nbytes()),
              0)
        << seed;
  }

  std::shared_ptr<SwapFile> file_;
  std::shared_ptr<ActivationStore> store_;
  int count_ = 0;
};

INSTANTIATE_TEST_SUITE_P(, ActivationStoreTest, ::testing::Bool(),
                         [](const auto &info) {
                           return info.param ? "Uring" : "Threads";
                         });

TEST_P(ActivationStoreTest, GivesBackWhatWasPut) {
  for (int round = 0; round < 3; ++round) {
    std::vector<Stored> stored;
    for (int g = 0; g < 5; ++g) {
      ActivationStore::Group group = store_->NewGroup();
      for (int i = 0; i < 3; ++i) {
        stored.push_back(Put(&group, Values(10 * g + i)));
      }
    }
    for (int g = 5; g-- > 0;) {
      for (const int i : {2, 0, 1}) {
        ExpectValues(stored[static_cast<size_t>(3 * g + i)], 10 * g + i);
      }
    }
    store_->DropFetched();
    ExpectValues(stored[4], 11);  // once more
    EXPECT_EQ(store_->stats().gone, 15 * kBytes);
    stored.clear();
    EXPECT_EQ(store_->stats().gone, 0);
  }
  // The room of what is over is that of what comes.
  EXPECT_LE(file_->stats().file_bytes, 15 * (kBytes + kSwapAlignment));
}

TEST_P(ActivationStoreTest, MemoryIsFreeWhenItIsThere) {
  ActivationStore::Group group = store_->NewGroup();
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> memory;
  std::vector<Stored> stored;
  for (int i = 0; i < 6; ++i) {
    const at::Tensor values = Values(i);
    memory.push_back(values.storage().getWeakStorageImpl());
    stored.push_back(Put(&group, values));
  }
  for (size_t i = 0; i + ActivationStore::kUnderWay < 6; ++i) {
    EXPECT_TRUE(memory[i].expired()) << i;
  }
  store_->AwaitOut(stored[5]);
  EXPECT_TRUE(memory[5].expired());
}

TEST_P(ActivationStoreTest, AGroupAndTheOneBeforeItComeBack) {
  std::vector<Stored> stored;
  for (int g = 0; g < 4; ++g) {
    ActivationStore::Group group = store_->NewGroup();
    for (int i = 0; i < 2; ++i)
      stored.push_back(Put(&group, Values(2 * g + i)));
  }
  for (const Stored &each : stored) store_->AwaitOut(each);
  const auto back = [&] { return store_->stats().bytes_back / kBytes; };
  ExpectValues(stored[7], 7);
  EXPECT_EQ(back(), 4);
  ExpectValues(stored[6], 6);
  EXPECT_EQ(back(), 4);
  stored[2] = stored[3] = nullptr;  // what nobody has does not come back
  ExpectValues(stored[5], 5);
  ExpectValues(stored[4], 4);
  EXPECT_EQ(back(), 4);
  ExpectValues(stored[1], 1);
  ExpectValues(stored[0], 0);
  EXPECT_EQ(back(), 6);
}

// Given once more without a read, as long as somebody has it.
TEST_P(ActivationStoreTest, IsReadOnce) {
  ActivationStore::Group group = store_->NewGroup();
  const Stored stored = Put(&group, Values(1));
  store_->AwaitOut(stored);
  {
    const auto first = store_->Get(stored), second = store_->Get(stored);
    TESSERA_ASSERT_OK(first);
    EXPECT_EQ(first->data(), second->data());
    EXPECT_EQ(store_->stats().bytes_back, kBytes);
  }
  ExpectValues(stored, 1);
  EXPECT_EQ(store_->stats().bytes_back, 2 * kBytes);
}

TEST_P(ActivationStoreTest, TheSameMemoryGoesOnce) {
  ActivationStore::Group group = store_->NewGroup();
  at::Tensor values = Values(1);
  const Stored first = Put(&group, values);
  EXPECT_EQ(Put(&group, values.view({2, kNumel / 2}).t()), first);
  store_->AwaitOut(first);
  values.mul_(2);
  EXPECT_NE(Put(&group, values), first);
  EXPECT_NE(Put(&group, Values(2)), first);
  ExpectValues(first, 1);
}

TEST_P(ActivationStoreTest, WhatIsSmallStays) {
  ActivationStore::Group group = store_->NewGroup();
  EXPECT_EQ(Put(&group, Values(1, kLeast / 4 - 1)), nullptr);
  EXPECT_NE(Put(&group, Values(1, kLeast / 4)), nullptr);
  // A batch of a data set is not a reason to move all of it; a third of what
  // one product made is.
  const at::Tensor set = Values(1, 33 * kNumel),
                   product = Values(1, 3 * kNumel);
  EXPECT_EQ(Put(&group, set.narrow(0, 0, kNumel)), nullptr);
  const Stored third = Put(&group, product.narrow(0, 0, kNumel));
  EXPECT_NE(third, nullptr);
  EXPECT_EQ(Put(&group, product.narrow(0, 0, 7)), third);
  store_ = ActivationStore::Create(/*disk=*/nullptr, kLeast);
  ActivationStore::Group of_devices = store_->NewGroup();
  EXPECT_EQ(Put(&of_devices, Values(1)), nullptr);
}

TEST_P(ActivationStoreTest, WhatIsLeftStays) {
  const at::Tensor buffer = Values(1);
  store_->Leave(buffer.storage());
  ActivationStore::Group group = store_->NewGroup();
  EXPECT_EQ(Put(&group, buffer), nullptr);
  EXPECT_NE(Put(&group, Values(2)), nullptr);
}

TEST_P(ActivationStoreTest, ErrorsOfTheDiskAreThoseOfGet) {
  enum Refused { kNone, kWrites, kReads };
  const auto refused = std::make_shared<std::atomic<Refused>>(kNone);
  system_.answer = [refused](bool write, int64_t, int64_t result) {
    return refused->load() == (write ? kWrites : kReads) ? -EIO : result;
  };
  for (const bool writes : {true, false}) {
    ActivationStore::Group group = store_->NewGroup();
    count_ = 3;
    const Stored stored = Put(&group, Values(1));
    store_->AwaitOut(stored);
    refused->store(writes ? kWrites : kReads);
    const Stored next = Put(&group, Values(2));
    store_->AwaitOut(next);
    EXPECT_THAT(
        store_->Get(writes ? next : stored),
        StatusIs(absl::StatusCode::kUnavailable,
                 AllOf(HasSubstr(writes ? "writing" : "reading"),
                       HasSubstr(writes ? "activation 4" : "activation 3"))));
    refused->store(kNone);
  }
}

}  // namespace
}  // namespace tessera
