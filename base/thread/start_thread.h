// StartThread returns a std::thread, or an error where the system has none
// left.
//
//   TESSERA_ASSIGN_OR_RETURN(thread_, StartThread("tessera-io", [this] { Run();
//   }));
//
// `ulimit -u`, a container's pids.max or the address space can refuse a thread;
// std::thread's constructor then throws, which ends the process where nobody
// catches it.
#ifndef BASE_THREAD_START_THREAD_H_
#define BASE_THREAD_START_THREAD_H_

#include <pthread.h>

#include <system_error>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tessera {

namespace thread_internal {
// Returns ResourceExhausted with `name`, `why`, and what to try.
absl::Status NoThread(const char* name, const char* why);
void MarkThread();
}  // namespace thread_internal

// Runs `work`, which may be move-only, on a new thread called `name`: a literal
// of at most 15 characters. The caller joins or detaches it. Returns
// ResourceExhausted if the system refuses; `work` is destroyed then, unrun.
template <typename Work>
absl::StatusOr<std::thread> StartThread(const char* name, Work work) {
  try {
    return std::thread([name, work = std::move(work)]() mutable {
      pthread_setname_np(pthread_self(), name);
      thread_internal::MarkThread();
      work();
    });
  } catch (const std::system_error& error) {
    return thread_internal::NoThread(name, error.what());
  }
}

// Returns whether StartThread started the calling thread, which then belongs
// neither to the program nor to libtorch.
bool StartedByTessera();

}  // namespace tessera
#endif  // BASE_THREAD_START_THREAD_H_
