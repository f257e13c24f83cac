// Runs the test program again as one of its programs (RunProgram in
// multiproc_launch_test.cc).
#ifndef TESTS_LAUNCH_MULTIPROC_LAUNCH_TEST_UTIL_H_
#define TESTS_LAUNCH_MULTIPROC_LAUNCH_TEST_UTIL_H_

#include <string>
#include <utility>
#include <vector>

#include "tests/support/process.h"

namespace tessera {

inline constexpr char kProgram[] = "TESSERA_LAUNCH_TEST_PROGRAM";

inline Env Named(const std::string& program, Env env) {
  env.emplace_back(kProgram, program);
  return env;
}

inline Finished RunOne(const std::string& program,
                       std::vector<std::string> args, Env env = {}) {
  return Process(std::move(args), Named(program, std::move(env))).Finish();
}

}  // namespace tessera
#endif  // TESTS_LAUNCH_MULTIPROC_LAUNCH_TEST_UTIL_H_
