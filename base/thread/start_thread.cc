#include "base/thread/start_thread.h"

#include "absl/strings/str_cat.h"

namespace tessera::thread_internal {

absl::Status NoThread(const char* name, const char* why) {
  return absl::ResourceExhaustedError(
      absl::StrCat("cannot start a thread (", name, "): ", why,
                   "; raise the limit of processes (ulimit -u, or pids.max of "
                   "the container)"));
}

}  // namespace tessera::thread_internal
