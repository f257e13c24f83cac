// main() of tests without ranks.
#include "third_party/gtest/run_and_exit.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  tessera::RunTestsAndExit();
}
