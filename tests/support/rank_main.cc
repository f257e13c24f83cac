// main() of tests with ranks: a rank where the pool started this process, all
// tests otherwise.
#include <memory>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/support/at_start.h"
#include "tests/support/fork_server.h"
#include "tests/support/rank_pool.h"

namespace tessera {
namespace {

// Ends the ranks while the report can still be written to: tools/build_times.py
// adds up what their starts took.
class EndOfRanks : public testing::Environment {
 public:
  void TearDown() override {
    RankPool::EndAll();
    const RankPool::Starts starts = RankPool::starts();
    testing::Test::RecordProperty("rank_pool_starts", starts.count);
    testing::Test::RecordProperty(
        "rank_pool_start_ms",
        absl::StrCat(absl::ToInt64Milliseconds(starts.time)));
  }
};

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  for (auto* function : tessera::StartFunctions()) function();
  tessera::ServeForks();
  tessera::ServeIfRank(&argc, argv);
  testing::InitGoogleTest(&argc, argv);
  testing::AddGlobalTestEnvironment(new tessera::EndOfRanks);
  return RUN_ALL_TESTS();
}
