// What the tests of shard groups share: four ranks in groups of two. The
// parameter is the stage.
#ifndef TESTS_EQUIVALENCE_SHARD_GROUPS_TEST_UTIL_H_
#define TESTS_EQUIVALENCE_SHARD_GROUPS_TEST_UTIL_H_

#include "gtest/gtest.h"
#include "tests/support/training.h"

namespace tessera {

inline constexpr int kWorldSize = 4;

class ShardGroupsTest : public ::testing::TestWithParam<int> {
 protected:
  ShardGroupsTest() {
    spec_.stage = GetParam();
    spec_.shard_group = 2;
  }
  TrainingSpec spec_;
};

}  // namespace tessera
#endif  // TESTS_EQUIVALENCE_SHARD_GROUPS_TEST_UTIL_H_
