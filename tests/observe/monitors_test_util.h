// What the tests of monitors share: trainings that write into a folder.
#ifndef TESTS_OBSERVE_MONITORS_TEST_UTIL_H_
#define TESTS_OBSERVE_MONITORS_TEST_UTIL_H_

#include <string>
#include <utility>

#include "gtest/gtest.h"
#include "tests/support/temp_folder.h"
#include "tests/support/training.h"

namespace tessera {

class MonitorsTest : public ::testing::Test {
 protected:
  static TrainingSpec Spec(int stage, std::string more) {
    TrainingSpec spec;
    spec.stage = stage;
    spec.more = std::move(more);
    return spec;
  }
  TempFolder folder_;
};

}  // namespace tessera
#endif  // TESTS_OBSERVE_MONITORS_TEST_UTIL_H_
