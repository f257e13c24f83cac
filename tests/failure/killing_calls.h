// Ends this process at one of its own calls to the file system: the calls that
// checkpoints are written by are counted, and before the one of a given number
// the process kills itself. Only in a program that this is linked into.
#ifndef TESTS_FAILURE_KILLING_CALLS_H_
#define TESTS_FAILURE_KILLING_CALLS_H_

#include <cstdint>

namespace tessera {

// From now on calls count, from 0; before call number `at` the process ends.
// -1: none.
void KillAtCall(int64_t at);
// Calls since then; no more are counted.
int64_t StopCountingCalls();

}  // namespace tessera
#endif  // TESTS_FAILURE_KILLING_CALLS_H_
