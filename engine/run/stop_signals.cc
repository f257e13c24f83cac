#include "engine/run/stop_signals.h"

#include <string.h>
#include <time.h>

#include <atomic>
#include <cstdint>

#include "base/system/process_defaults.h"

namespace tessera {
namespace {

constexpr int kSignals[] = {SIGTERM, SIGUSR1};

// Read by the handler: set before it is installed.
struct sigaction g_before[NSIG];
std::atomic<int> g_received{0};
// When each came first, in milliseconds; 0: not yet.
std::atomic<int64_t> g_first_at[NSIG];
std::atomic<bool> g_caught{false};
static_assert(std::atomic<int>::is_always_lock_free);
static_assert(std::atomic<int64_t>::is_always_lock_free);

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
  if (IsSurvived(before)) {
    g_received.store(sig);
    return;
  }
  if (HasHandler(before)) {
    if ((before.sa_flags & SA_SIGINFO) != 0) {
      before.sa_sigaction(sig, info, context);
    } else {
      before.sa_handler(sig);
    }
    g_received.store(sig);
    return;
  }
  // Two may be noted at once, on two threads: one exchange says which was first
  // and when.
  const int64_t now = NowMs();
  int64_t first_at = 0;
  const bool first = g_first_at[sig].compare_exchange_strong(first_at, now);
  g_received.store(sig);
  if (first || now - first_at < kSameSignalMs) return;
  // A repeated signal acts as if nobody had caught it.
  sigaction(sig, &before, nullptr);
  raise(sig);
}

}  // namespace

std::unique_ptr<StopSignals> StopSignals::Catch() {
  if (g_caught.exchange(true)) return nullptr;
  g_received = 0;
  for (const int sig : kSignals) {
    g_first_at[sig] = 0;
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

std::string StopSignals::name() const {
  switch (received()) {
    case SIGTERM:
      return "SIGTERM";
    case SIGUSR1:
      return "SIGUSR1";
    default:
      return "";
  }
}

}  // namespace tessera
