#include "engine/stop_signals.h"

#include <string.h>

#include <atomic>

namespace tessera {
namespace {

constexpr int kSignals[] = {SIGTERM, SIGUSR1};

// Read by the handler: set before it is installed.
struct sigaction g_before[NSIG];
std::atomic<int> g_received{0};
std::atomic<bool> g_caught{false};
static_assert(std::atomic<int>::is_always_lock_free);

bool HasHandler(const struct sigaction& act) {
  return (act.sa_flags & SA_SIGINFO) != 0 ||
         (act.sa_handler != SIG_DFL && act.sa_handler != SIG_IGN);
}

void Note(int sig, siginfo_t* info, void* context) {
  const struct sigaction& before = g_before[sig];
  if (HasHandler(before)) {
    if ((before.sa_flags & SA_SIGINFO) != 0) {
      before.sa_sigaction(sig, info, context);
    } else {
      before.sa_handler(sig);
    }
    g_received.store(sig);
    return;
  }
  if (g_received.exchange(sig) == 0) return;
  // The second time: as if nobody had caught it.
  sigaction(sig, &before, nullptr);
  raise(sig);
}

}  // namespace

std::unique_ptr<StopSignals> StopSignals::Catch() {
  if (g_caught.exchange(true)) return nullptr;
  g_received = 0;
  for (const int sig : kSignals) {
    sigaction(sig, nullptr, &g_before[sig]);
    if (g_before[sig].sa_handler == SIG_IGN) continue;
    struct sigaction act;
    memset(&act, 0, sizeof(act));
    act.sa_sigaction = Note;
    act.sa_flags = SA_SIGINFO | SA_RESTART;
    sigaction(sig, &act, nullptr);
  }
  return std::unique_ptr<StopSignals>(new StopSignals);
}

StopSignals::~StopSignals() {
  for (const int sig : kSignals) sigaction(sig, &g_before[sig], nullptr);
  g_caught = false;
}

int StopSignals::received() const { return g_received; }

}  // namespace tessera
