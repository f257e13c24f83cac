// main() of tests with ranks: a rank where the pool started this process, all
// tests otherwise.
#include "gtest/gtest.h"
#include "tests/support/rank_pool.h"

int main(int argc, char** argv) {
  tessera::ServeIfRank(&argc, argv);
  testing::InitGoogleTest(&argc, argv);
  const int result = RUN_ALL_TESTS();
  tessera::RankPool::EndAll();
  return result;
}
