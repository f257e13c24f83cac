#include "offload/shard_states.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "base/layout/flat_buffer.h"
#include "base/memory/ledger.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "offload/disk/swap_file.h"
#include "offload/disk/swap_test_util.h"
#include "offload/remainders.h"
#include "torch/torch.h"

namespace tessera {
namespace {

using State = ShardStates::State;
using ::testing::ElementsAre;

constexpr int64_t kNumel = 2048;

// By uring or threads (swap_test_util.h).
class ShardStatesTest : public SwapFileTest {
 protected:
  ShardStatesTest() : states_("unit", kNumel, at::kCPU, nullptr) {}
  TieredBuffer::Place Disk() {
    if (file_ == nullptr) file_ = Open();
    return {Tier::kDisk, file_};
  }
  // A working shard in memory, of these values.
  void SetWorking(at::ScalarType dtype, double value) {
    TESSERA_ASSERT_OK(states_.Add(State::kWorking, dtype, {}));
    states_.At(State::kWorking).View().fill_(value);
  }
  // What a state holds, wherever it lies.
  static at::Tensor ValuesOf(ShardStates& states, State state) {
    auto raised = Raised::Of(&states.At(state));
    TESSERA_EXPECT_OK(raised);
    return raised->View().clone();
  }
  at::Tensor ValuesOf(State state) { return ValuesOf(states_, state); }

  std::shared_ptr<SwapFile> file_;
  ShardStates states_;
};

TEST_P(ShardStatesTest, TheValueIsTheWorkingShardUntilThereAreMasters) {
  SetWorking(at::kBFloat16, 3);
  EXPECT_EQ(&states_.value(), &states_.At(State::kWorking));
  EXPECT_EQ(states_.separate_working(), nullptr);
  TESSERA_ASSERT_OK(states_.MakeMasters(at::kFloat, Disk()));
  EXPECT_EQ(&states_.value(), &states_.At(State::kMasters));
  EXPECT_EQ(states_.separate_working(), &states_.At(State::kWorking));
  EXPECT_TRUE(at::equal(ValuesOf(State::kMasters),
                        torch::full({kNumel}, 3, at::kFloat)));
}

TEST_P(ShardStatesTest, NamesItsBuffersAndGoesThroughThemInOrder) {
  SetWorking(at::kFloat, 0);
  TESSERA_ASSERT_OK(states_.AddMoments(
      {{"exp_avg", at::kFloat}, {"exp_avg_sq", at::kFloat}}, Disk()));
  TESSERA_ASSERT_OK(states_.Add(State::kGradient, at::kFloat, Disk()));
  std::vector<std::string> names;
  TESSERA_ASSERT_OK(states_.ForEach([&](State, TieredBuffer& buffer) {
    if (&buffer != &states_.At(State::kWorking)) {
      names.push_back(buffer.what());
    }
    return absl::OkStatus();
  }));
  EXPECT_THAT(names,
              ElementsAre("gradient of unit unit", "exp_avg of unit unit",
                          "exp_avg_sq of unit unit"));
  EXPECT_EQ(states_.Written().size(), 3u);
}

TEST_P(ShardStatesTest, APartOfAWholeCopyCannotMove) {
  auto whole = FlatBuffer::Allocate(2 * kNumel, at::kFloat, at::kCPU,
                                    MemoryKind::kParameters);
  TESSERA_ASSERT_OK(whole);
  states_.SetWorking(whole->Part({kNumel, 2 * kNumel}));
  EXPECT_FALSE(states_.can_move(State::kWorking));
  EXPECT_FALSE(states_.can_move(State::kMasters));  // there are none
  states_.value().View().fill_(5);
  EXPECT_EQ(whole->View({kNumel, 2 * kNumel}).sum().item<float>(), 5 * kNumel);
  EXPECT_EQ(whole->View({0, kNumel}).sum().item<float>(), 0);
}

// Wherever the masters lie.
TEST_P(ShardStatesTest, AWriteReachesMastersWhereItChangesBits) {
  for (const bool on_disk : {false, true}) {
    ShardStates states("unit", kNumel, at::kCPU, nullptr);
    TESSERA_ASSERT_OK(states.Add(State::kWorking, at::kBFloat16, {}));
    TESSERA_ASSERT_OK(states.MakeMasters(
        at::kFloat, on_disk ? Disk() : TieredBuffer::Place()));
    {
      auto masters = states.RaiseValue();
      TESSERA_ASSERT_OK(masters);
      masters->View().fill_(1.001);  // 1 in bfloat16
      TESSERA_ASSERT_OK(masters->Commit());
    }
    TESSERA_ASSERT_OK(states.RoundMasters());
    const at::Tensor written = states.At(State::kWorking).View().clone();
    written[7] = 2;
    TESSERA_ASSERT_OK(states.TakeWorking(written));
    EXPECT_TRUE(at::equal(states.At(State::kWorking).View(), written));
    auto masters = states.RaiseValue();
    TESSERA_ASSERT_OK(masters);
    EXPECT_EQ(masters->View()[7].item<float>(), 2);
    EXPECT_EQ(masters->View()[8].item<float>(), 1.001f);
  }
}

// Wherever the halves lie, and whether the program writes into the working
// shard itself or into a copy of it.
TEST_P(ShardStatesTest, AWriteLeavesRemaindersOfOtherElements) {
  for (const bool on_disk : {false, true}) {
    for (const bool in_place : {false, true}) {
      ShardStates states("unit", kNumel, at::kCPU, nullptr);
      TESSERA_ASSERT_OK(states.Add(State::kWorking, at::kBFloat16, {}));
      TESSERA_ASSERT_OK(states.MakeMasters(kRemainderDtype, {}));
      EXPECT_TRUE(states.splits());
      EXPECT_EQ(states.value_dtype(), at::kFloat);
      {
        auto masters = states.RaiseValue();
        TESSERA_ASSERT_OK(masters);
        masters->View().fill_(1.001);  // 1 in bfloat16
        TESSERA_ASSERT_OK(masters->Commit());
      }
      if (on_disk) {
        TESSERA_ASSERT_OK(states.At(State::kMasters).Move(Disk()));
        if (!in_place) {
          TESSERA_ASSERT_OK(states.At(State::kWorking).Move(Disk()));
        }
      }
      const at::Tensor before = ValuesOf(states, State::kWorking);
      EXPECT_TRUE(before.eq(1).all().item<bool>());
      const at::Tensor written =
          in_place ? states.At(State::kWorking).View() : before.clone();
      written[7] = 2;
      TESSERA_ASSERT_OK(
          states.TakeWorking(written, in_place ? before : at::Tensor()));
      EXPECT_TRUE(at::equal(ValuesOf(states, State::kWorking), written));
      auto masters = states.RaiseValue();
      TESSERA_ASSERT_OK(masters);
      EXPECT_EQ(masters->View()[7].item<float>(), 2);
      EXPECT_EQ(masters->View()[8].item<float>(), 1.001f);
    }
  }
}

TEST_P(ShardStatesTest, PartsOfSplitMastersAreReadAndWritten) {
  for (const bool on_disk : {false, true}) {
    ShardStates states("unit", kNumel, at::kCPU, nullptr);
    TESSERA_ASSERT_OK(states.Add(State::kWorking, at::kBFloat16, {}));
    TESSERA_ASSERT_OK(states.MakeMasters(kRemainderDtype, {}));
    TESSERA_ASSERT_OK(
        states.SplitFrom({0, kNumel}, torch::full({kNumel}, 1.001)));
    if (on_disk) {
      TESSERA_ASSERT_OK(states.At(State::kMasters).Move(Disk()));
    }
    TESSERA_ASSERT_OK(states.SplitFrom({100, 1500}, torch::full({1400}, 3.7)));
    const at::Tensor part = torch::empty({900}, at::kFloat);
    TESSERA_ASSERT_OK(states.JoinTo({1000, 1900}, part));
    EXPECT_TRUE(part.slice(0, 0, 500).eq(3.7f).all().item<bool>());
    EXPECT_TRUE(part.slice(0, 500).eq(1.001f).all().item<bool>());
    TESSERA_ASSERT_OK(states.RoundMasters());  // changes nothing
    TESSERA_ASSERT_OK(states.JoinTo({1000, 1900}, part));
    EXPECT_EQ(part[0].item<float>(), 3.7f);
  }
}

TEST_P(ShardStatesTest, MomentsAreAllThereOrNone) {
  MemoryLedger& ledger = MemoryLedger::Host();
  const MemoryLimit limit(&ledger, ledger.total().current_bytes + kNumel * 6,
                          "a test");
  const absl::Status made = states_.AddMoments(
      {{"exp_avg", at::kFloat}, {"exp_avg_sq", at::kFloat}}, {});
  EXPECT_THAT(made, StatusIs(absl::StatusCode::kResourceExhausted));
  EXPECT_TRUE(states_.moments().empty());
}

TEST_P(ShardStatesTest, NextValuesReplaceThoseOfNow) {
  SetWorking(at::kFloat, 0);
  TESSERA_ASSERT_OK(states_.AddMoments({{"exp_avg", at::kFloat}}, Disk()));
  TESSERA_ASSERT_OK(states_.MakeRoomForNext());
  TieredBuffer& moment = states_.moments()[0];
  ASSERT_TRUE(moment.next().defined());
  const int64_t now = moment.room().extent().begin,
                next = moment.next().extent().begin;
  states_.SwapNext();
  EXPECT_EQ(moment.room().extent().begin, next);
  EXPECT_EQ(moment.next().extent().begin, now);
  states_.DropNext();
  EXPECT_FALSE(moment.next().defined());
}

INSTANTIATE_TEST_SUITE_P(All, ShardStatesTest, ::testing::Values(true, false));

}  // namespace
}  // namespace tessera
