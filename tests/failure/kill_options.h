// What kill_test.cc and checkpoint_kill_test.cc are started with, and what they
// draw for each seed.
#ifndef TESTS_FAILURE_KILL_OPTIONS_H_
#define TESTS_FAILURE_KILL_OPTIONS_H_

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace tessera {

// One of how many seeds has a host whose clock is set again and again, ranks
// with children that outlive them, ranks that start without descriptors 0, 1
// and 2; 0: none has.
struct Hardships {
  int moving_clock = 0;
  int forks = 2;
  int closed = 3;
};

class SeededDraw {
 public:
  explicit SeededDraw(int seed) : random_(static_cast<unsigned>(seed)) {}

  int64_t UpTo(int64_t n) {
    return static_cast<int64_t>(random_() % static_cast<uint64_t>(n));
  }
  // True for one of `n`; for none if that is 0.
  bool IsOneOf(int n) { return UpTo(std::max(n, 1)) == 0 && n > 0; }

 private:
  std::mt19937 random_;
};

// Reads "NAME=NUMBER" of argv into the number of each name. An argument that is
// none of these is said, and false returned.
inline bool ReadNumbers(
    int argc, char** argv,
    const std::vector<std::pair<const char*, int*>>& numbers) {
  for (int i = 1; i < argc; ++i) {
    bool known = false;
    for (const auto& [name, number] : numbers) {
      absl::string_view arg = argv[i];
      known |= absl::ConsumePrefix(&arg, name) &&
               absl::ConsumePrefix(&arg, "=") && absl::SimpleAtoi(arg, number);
    }
    if (known) continue;
    std::fprintf(stderr, "unknown argument %s\n", argv[i]);
    return false;
  }
  return true;
}

}  // namespace tessera
#endif  // TESTS_FAILURE_KILL_OPTIONS_H_
