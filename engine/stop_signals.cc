#include "engine/stop_signals.h"

#include <string.h>
#include <time.h>

#include <atomic>
#include <cstdint>

namespace tessera {
namespace {

constexpr int kSignals[] = {SIGTERM, SIGUSR1};

// Read by the handler: set before it is installed.
struct sigaction g_before[NSIG];
std::atomic<int> g_received{0};
std::atomic<int64_t> g_received_at{0};  // the first, in milliseconds
std::atomic<bool> g_caught{false};
static_assert(std::atomic<int>::is_always_lock_free);

// A signal to a group of processes comes twice, from who sends it and from the
// launcher that passes it on.
constexpr int64_t kSameSignalMs = 5000;

int64_t NowMs() {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1000 + now.tv_nsec / 1'000'000;
}

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
  const int before_it = g_received.exchange(sig);
  if (before_it != sig) {
    g_received_at = NowMs();
    return;
  }
  if (NowMs() - g_received_at < kSameSignalMs) return;
  // The same one once more: as if nobody had caught it.
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
