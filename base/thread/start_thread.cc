#include "base/thread/start_thread.h"

#include "absl/strings/str_cat.h"

namespace tessera {
namespace {
thread_local bool started_by_tessera = false;
}  // namespace

bool StartedByTessera() { return started_by_tessera; }

namespace thread_internal {

void MarkThread() { started_by_tessera = true; }

absl::Status NoThread(const char* name, const char* why) {
  return absl::ResourceExhaustedError(
      absl::StrCat("cannot start a thread (", name, "): ", why,
                   "; raise the limit of processes (ulimit -u, or pids.max of "
                   "the container)"));
}

}  // namespace thread_internal
}  // namespace tessera
