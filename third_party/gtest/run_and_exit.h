// The end of a main() of tests: runs them, and ends the process without
// destroying what is global. libtorch's tables of operators alone would take
// 0.1 s of a processor in each process.
//
// Sanitizers look for what is wrong, and say so, in an ordinary exit.
#ifndef THIRD_PARTY_GTEST_RUN_AND_EXIT_H_
#define THIRD_PARTY_GTEST_RUN_AND_EXIT_H_

#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "gtest/gtest.h"

namespace tessera {

[[noreturn]] inline void ExitAtOnce(int code) {
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
  std::exit(code);
#else
  std::fflush(nullptr);
  _exit(code);
#endif
}

// REQUIRES: testing::InitGoogleTest was called.
[[noreturn]] inline void RunTestsAndExit() { ExitAtOnce(RUN_ALL_TESTS()); }

}  // namespace tessera
#endif  // THIRD_PARTY_GTEST_RUN_AND_EXIT_H_
