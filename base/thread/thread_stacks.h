// Writes the stacks of all threads of this process as text, while they run.
//
// A signal goes to each thread in turn; its handler records where the thread
// is, and the thread goes on. The handler is installed only during the call.
// One effect on the program: a system call that is under way may end with EINTR
// (sleep and poll do, whatever the flags).
//
// A thread that blocks the signal, or is stuck in the kernel, is listed without
// a stack, with its state.
#ifndef BASE_THREAD_THREAD_STACKS_H_
#define BASE_THREAD_THREAD_STACKS_H_

#include <string>

#include "absl/time/time.h"

namespace tessera {

// Returns the stacks within about `deadline`. Threads that were not reached by
// then are listed without a stack. One call runs at a time; others wait. Uses
// SIGRTMAX - 3, which the program should not use meanwhile.
//
//   thread 4711 "tessera-comm" S
//     #0 0x00007f... absl::Mutex::Await (libtorch_cpu.so+0x1234)
std::string AllThreadStacks(absl::Duration deadline = absl::Seconds(2));

}  // namespace tessera
#endif  // BASE_THREAD_THREAD_STACKS_H_
