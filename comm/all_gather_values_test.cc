#include "comm/all_gather_values.h"

#include "base/status_matchers.h"
#include "comm/fake_communicator_test_util.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Rank 0 of two; the other sends `theirs`.
struct TwoRanks : FakeCommunicator {
  explicit TwoRanks(const std::string& theirs)
      : FakeCommunicator(/*rank=*/0, /*world_size=*/2) {
    texts = [theirs](const std::string& mine) {
      return std::vector<std::string>{mine, theirs};
    };
  }
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
