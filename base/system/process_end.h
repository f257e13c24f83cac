// EndProcess: ends this process where a call of the library has nothing to
// return to. A program that lives beside others in its process (an interpreter,
// a server) says what happens instead.
#ifndef BASE_SYSTEM_PROCESS_END_H_
#define BASE_SYSTEM_PROCESS_END_H_

#include <functional>

namespace tessera {

enum class ProcessEnd {
  // The task requested instead of training is done (--plan_world). By
  // default exit(code).
  kPlanned,
  // --help is printed, or an argument is refused (Start). By default
  // exit(code).
  kUsage,
  // The ranks that this process has started (--world) have ended, and threads
  // that served them still run. By default _exit(code), after a flush of stdio.
  kLaunched,
  // A thread is in a call that nobody can end (a collective without its peers).
  // By default _exit(code).
  kStuck,
};

// `handler` is called in place of the default, on the thread that comes to the
// end, with the exit code; null: the default again. Any thread. LOCAL.
//
// If it returns, the call that asked for the end returns Cancelled (kPlanned:
// Engine::Create, kLaunched: Init, kUsage: Start); after kStuck the process
// ends all the same, since what is stuck may never be destroyed.
void SetProcessEndHandler(
    std::function<void(ProcessEnd why, int code)> handler);

// Returns if a handler does, and `why` is not kStuck.
void EndProcess(ProcessEnd why, int code);

}  // namespace tessera
#endif  // BASE_SYSTEM_PROCESS_END_H_
