// Has main() (rank_main.cc) call functions before all else, in the test process
// and in each rank: what must be done before libtorch is used, whichever test
// comes first.
#ifndef TESTS_SUPPORT_AT_START_H_
#define TESTS_SUPPORT_AT_START_H_

#include <vector>

namespace tessera {

inline std::vector<void (*)()>& StartFunctions() {
  static auto* const functions = new std::vector<void (*)()>;
  return *functions;
}

inline bool RunAtStart(void (*function)()) {
  StartFunctions().push_back(function);
  return true;
}

}  // namespace tessera
#endif  // TESTS_SUPPORT_AT_START_H_
