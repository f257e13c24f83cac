// The conformance of communicators of 2, 3 and 4 ranks.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/rank_pool.h"
#include "torch/torch.h"

namespace tessera {
namespace {

TESSERA_RANK_FUNCTION(SumOfRanks) {
  at::Tensor t = at::full({3}, world.rank() + 1, at::kFloat);
  TESSERA_RETURN_IF_ERROR(
      world.communicator()->AllReduceSum(t, {"sum"}).Wait());
  return absl::StrCat(t[2].item<float>());
}

TEST(CommTest, SumOfRanks) {
  for (int w : {1, 2, 3, 4}) {
    for (const auto& answer : RankPool::Get(w)->Run("SumOfRanks", "")) {
      EXPECT_THAT(answer, IsOkAndHolds(absl::StrCat(w * (w + 1) / 2)));
    }
  }
}

}  // namespace
}  // namespace tessera
