// The table holds plain bytes, since a signal's handler may not take locks or
// memory. A slot is written before its `begin` is stored, and read after it was
// loaded.
#include "data/truncated_files.h"

#include <signal.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "absl/base/const_init.h"
#include "absl/synchronization/mutex.h"

namespace tessera {
namespace {

struct Slot {
  std::atomic<const char*> begin{nullptr};
  size_t bytes = 0;
  char line[512];
  size_t length = 0;
};

constexpr int kSlots = 1024;
Slot g_slots[kSlots];
ABSL_CONST_INIT absl::Mutex g_mutex(absl::kConstInit);
struct sigaction g_before;

void NameTheFile(int sig, siginfo_t* info, void*) {
  const auto* const address = static_cast<const char*>(info->si_addr);
  for (const Slot& slot : g_slots) {
    const char* const begin = slot.begin.load(std::memory_order_acquire);
    if (begin == nullptr || address < begin || address >= begin + slot.bytes) {
      continue;
    }
    if (write(STDERR_FILENO, slot.line, slot.length) < 0) break;
  }
  // The access is repeated, and the previous handler takes it.
  sigaction(sig, &g_before, nullptr);
}

void Install() {
  static const bool installed = [] {
    struct sigaction action;
    memset(&action, 0, sizeof(action));
    action.sa_sigaction = NameTheFile;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    return sigaction(SIGBUS, &action, &g_before) == 0;
  }();
  (void)installed;
}

}  // namespace

void NameIfTruncated(const void* begin, size_t bytes, const std::string& path) {
  const std::string line =
      path + ": the file was truncated while this process read it\n";
  absl::MutexLock lock(&g_mutex);
  Install();
  for (Slot& slot : g_slots) {
    if (slot.begin.load(std::memory_order_relaxed) != nullptr) continue;
    slot.bytes = bytes;
    // The end of a long path says more than its begin.
    slot.length = std::min(line.size(), sizeof(slot.line));
    memcpy(slot.line, line.data() + line.size() - slot.length, slot.length);
    slot.begin.store(static_cast<const char*>(begin),
                     std::memory_order_release);
    return;
  }
}

void Forget(const void* begin) {
  absl::MutexLock lock(&g_mutex);
  for (Slot& slot : g_slots) {
    if (slot.begin.load(std::memory_order_relaxed) == begin) {
      slot.begin.store(nullptr, std::memory_order_release);
    }
  }
}

}  // namespace tessera
