// Faults at one of this process's own calls to the file system: the calls that
// checkpoints are written and read by are counted, and the one of a given
// number fails, or the process kills itself before it. Only in a program that
// this is linked into.
#ifndef TESTS_FAILURE_KILLING_CALLS_H_
#define TESTS_FAILURE_KILLING_CALLS_H_

#include <cstdint>
#include <string>

namespace tessera {

// Of CallFault::error, beside the numbers of errno.
inline constexpr int kKill = 0;        // SIGKILL
inline constexpr int kShortCall = -1;  // a read or write of one byte

struct CallFault {
  int64_t at = -1;  // number of the call, from 0; -1: none
  int error = kKill;
  std::string under;  // only calls on what lies in this folder count
};

// From now on calls count, from 0. Not while any is under way.
void CountCalls(const CallFault& fault);
// Calls since then; no more are counted.
int64_t StopCountingCalls();

}  // namespace tessera
#endif  // TESTS_FAILURE_KILLING_CALLS_H_
