#include "comm/all_gather_values.h"

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Rank 0 of two; the other sends `theirs`.
class TwoRanks : public Communicator {
 public:
  explicit TwoRanks(std::string theirs) : theirs_(std::move(theirs)) {}
  int rank() const override { return 0; }
  int world_size() const override { return 2; }
  absl::string_view backend() const override { return "two"; }
  CommFuture AllGather(at::Tensor, at::Tensor, CommTag) override { return {}; }
  CommFuture ReduceScatterSum(at::Tensor, at::Tensor, CommTag,
                              double) override {
    return {};
  }
  CommFuture AllReduceSum(at::Tensor, CommTag) override { return {}; }
  CommFuture Broadcast(at::Tensor, int, CommTag) override { return {}; }
  absl::StatusOr<std::vector<std::string>> AllGatherStrings(
      absl::string_view mine, CommTag) override {
    return std::vector<std::string>{std::string(mine), theirs_};
  }
  void Announce(const absl::Status&) override {}
  bool AllAnnounced(absl::Duration) override { return true; }
  void ClearAnnouncement() override {}

 private:
  const std::string theirs_;
};

std::string Bytes(const std::vector<int64_t>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()),
                     values.size() * sizeof(int64_t));
}

const std::vector<int64_t> kMine = {1, -2};

TEST(AllGatherValues, GivesThemByRank) {
  TwoRanks comm(Bytes({3, 4}));
  const auto all = AllGatherValues(&comm, kMine, CommTag{"numbers"});
  TESSERA_ASSERT_OK(all.status());
  EXPECT_THAT(*all, ElementsAre(ElementsAre(1, -2), ElementsAre(3, 4)));
}

TEST(AllGatherValues, WantsAsManyOfAll) {
  TwoRanks comm(Bytes({3}));
  EXPECT_THAT(AllGatherValues(&comm, kMine, CommTag{"numbers"}),
              StatusIs(absl::StatusCode::kInternal,
                       HasSubstr("numbers: rank 1 sent 1 values")));
}

TEST(AllGatherLists, TakesAnyNumber) {
  TwoRanks comm("");
  const auto all = AllGatherLists(&comm, kMine, CommTag{"numbers"});
  TESSERA_ASSERT_OK(all.status());
  EXPECT_THAT(*all, ElementsAre(ElementsAre(1, -2), IsEmpty()));
}

TEST(AllGatherLists, WantsWholeValues) {
  TwoRanks comm("0123456789");
  EXPECT_THAT(AllGatherLists(&comm, kMine, CommTag{"numbers"}),
              StatusIs(absl::StatusCode::kInternal,
                       HasSubstr("numbers: rank 1 sent 10 bytes")));
}

TEST(AllGatherValue, GivesOneOfEach) {
  TwoRanks comm(Bytes({7}));
  const auto all = AllGatherValue<int64_t>(&comm, 5, CommTag{"number"});
  TESSERA_ASSERT_OK(all.status());
  EXPECT_THAT(*all, ElementsAre(5, 7));
}

TEST(AllGatherValueAndText, PartsThem) {
  TwoRanks comm(Bytes({7}) + "words");
  const auto all =
      AllGatherValueAndText<int64_t>(&comm, 5, "mine", CommTag{"number"});
  TESSERA_ASSERT_OK(all.status());
  ASSERT_EQ(all->size(), 2u);
  EXPECT_EQ((*all)[0].value, 5);
  EXPECT_EQ((*all)[0].text, "mine");
  EXPECT_EQ((*all)[1].value, 7);
  EXPECT_EQ((*all)[1].text, "words");
}

TEST(AllGatherValueAndText, WantsAValue) {
  TwoRanks comm("");  // of a rank that is in another exchange
  EXPECT_THAT(
      AllGatherValueAndText<int64_t>(&comm, 5, "mine", CommTag{"number"}),
      StatusIs(absl::StatusCode::kInternal, HasSubstr("rank 1 sent 0 bytes")));
}

}  // namespace
}  // namespace tessera
