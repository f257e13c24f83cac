// What ranks can tell about the cost of their collectives: for whom they
// waited, and the files that are written at the end.
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/file.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/rank_pool.h"
#include "torch/torch.h"

namespace tessera {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;

// Rank 1 comes 20 ms late, twenty times. Returns the sums in ms.
TESSERA_RANK_FUNCTION(Rank1IsLate) {
  Communicator& comm = *world.communicator();
  at::Tensor t = torch::ones({1000});
  for (int i = 0; i < 20; ++i) {
    TESSERA_RETURN_IF_ERROR(comm.Barrier("before"));
    if (world.rank() == 1) absl::SleepFor(absl::Milliseconds(20));
    TESSERA_RETURN_IF_ERROR(comm.AllReduceSum(t, {"reduce of v"}).Wait());
  }
  TESSERA_ASSIGN_OR_RETURN(const auto waited, comm.WaitedForByAll());
  std::string text;
  for (absl::Duration d : waited) {
    absl::StrAppend(&text, absl::ToInt64Milliseconds(d), " ");
  }
  return text;
}

TEST(StragglerTest, TheOthersHaveWaitedForTheLateRank) {
  for (int w : {2, 3}) {
    const RankPool::Answers answers = RankPool::Get(w)->Run("Rank1IsLate", "");
    for (const auto& answer : answers) {
      TESSERA_ASSERT_OK(answer);
      EXPECT_EQ(*answer, *answers[0]);  // all are told the same
    }
    std::vector<int> ms(w);
    std::istringstream in(*answers[0]);
    for (int& value : ms) in >> value;
    // Each of the others, 20 times 20 ms; a sleep is never shorter, but some of
    // it may pass before they have come themselves.
    EXPECT_GT(ms[1], (w - 1) * 320) << *answers[0];
    for (int r = 0; r < w; ++r) {
      if (r != 1) EXPECT_LT(ms[r], ms[1] / 2) << *answers[0];
    }
  }
}

TESSERA_RANK_FUNCTION(SomeCollectives) {
  at::Tensor t = torch::ones({1000});
  for (int i = 0; i < 3; ++i) {
    TESSERA_RETURN_IF_ERROR(
        world.communicator()->AllReduceSum(t, {"unit \"a\""}).Wait());
  }
  return world.communicator()->Report();
}

TEST(CommLogTest, IsWrittenAtTheEnd) {
  const std::string dir = testing::TempDir();
  setenv("TESSERA_COMM_LOG", (dir + "/comm.txt").c_str(), 1);
  const std::string row =
      "all-reduce +3 +12000 +[0-9.]+ +[0-9.]+ +[0-9.]+ +[0-9.]+ +[0-9.]+  "
      "unit \"a\"\n";
  {
    RankPoolOptions options;
    options.world_size = 3;
    options.backend = "gloo";
    RankPool pool(options);
    for (const auto& answer : pool.Run("SomeCollectives", "")) {
      TESSERA_ASSERT_OK(answer);
      EXPECT_THAT(*answer, ContainsRegex(row));  // on demand
    }
  }
  unsetenv("TESSERA_COMM_LOG");
  TESSERA_ASSERT_OK_AND_ASSIGN(const std::string log,
                               ReadWholeFile(dir + "/comm.txt"));
  EXPECT_THAT(log, HasSubstr("collectives of rank 0 of 3, gloo"));
  EXPECT_THAT(log, ContainsRegex(row));
  EXPECT_THAT(log, ContainsRegex("waited for rank 2: [0-9.]+ ms\n"));
}

}  // namespace
}  // namespace tessera
