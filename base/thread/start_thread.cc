// An error looks at the limits, since the system's EAGAIN is the same for a
// stack that has no room and for one process too many.
#include "base/thread/start_thread.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <cstddef>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/system/system_limits.h"

namespace tessera {
namespace {

thread_local bool started_by_tessera = false;

size_t StackBytes() {
  pthread_attr_t attributes;
  size_t bytes = 8 << 20;
  if (pthread_getattr_default_np(&attributes) == 0) {
    pthread_attr_getstacksize(&attributes, &bytes);
    pthread_attr_destroy(&attributes);
  }
  return bytes;
}

// Returns whether a mapping of `bytes`, made as a stack's is, succeeds.
bool HasRoom(size_t bytes) {
  void* const room = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
  if (room == MAP_FAILED) return false;
  munmap(room, bytes);
  return true;
}

// Says what to do about a thread that could not be started.
std::string ThreadLimit() {
  const size_t stack = StackBytes();
  if (!HasRoom(stack)) {
    const std::string mib = LimitText(RLIMIT_AS, 1 << 20);
    return absl::StrCat(
        "; there is no room for its stack of ", stack >> 20, " MiB: ",
        mib.empty() ? "memory is short"
                    : absl::StrCat("the address space is limited to ", mib,
                                   " MiB; raise the limit (ulimit -v)"));
  }
  const std::string processes = LimitText(RLIMIT_NPROC, 1);
  return absl::StrCat(
      "; raise the limit of processes (ulimit -u",
      processes.empty() ? "" : absl::StrCat(", now ", processes),
      ", or pids.max of the container)");
}

}  // namespace

bool StartedByTessera() { return started_by_tessera; }

namespace thread_internal {

void MarkThread() { started_by_tessera = true; }

absl::Status NoThread(const char* name, const char* why) {
  return absl::ResourceExhaustedError(
      absl::StrCat("cannot start a thread (", name, "): ", why, ThreadLimit()));
}

}  // namespace thread_internal
}  // namespace tessera
