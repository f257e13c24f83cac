// The stacks of all threads of this process, as text, while they run.
//
// A signal goes to each thread in turn; its handler records where the thread
// is, and the thread goes on. The handler is there only during the call. What
// this does to the program: a system call that is under way may end with EINTR
// (sleep and poll do, whatever the flags).
//
// A thread that blocks the signal, or is stuck in the kernel, is listed without
// a stack, with its state.
#ifndef BASE_THREAD_THREAD_STACKS_H_
#define BASE_THREAD_THREAD_STACKS_H_

#include <string>

#include "absl/time/time.h"

namespace tessera {

// Ends within about `deadline`. Threads that were not asked by then are listed
// without a stack. One call at a time; others wait. Takes SIGRTMAX - 3, which
// the program should not use meanwhile.
//
//   thread 4711 "tessera-comm" S
//     #0 0x00007f... absl::Mutex::Await (libtorch_cpu.so+0x1234)
std::string AllThreadStacks(absl::Duration deadline = absl::Seconds(2));

}  // namespace tessera
#endif  // BASE_THREAD_THREAD_STACKS_H_
