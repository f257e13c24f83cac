// Signals get handlers that do nothing instead of SIG_IGN: a program that is
// executed inherits ignored signals, and `yes | head` in a shell would never
// end.
#include "base/system/process_defaults.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include <initializer_list>

namespace tessera {
namespace {

void OnPipe(int) {}

void OnNotice(int) {
  constexpr char kText[] =
      "tessera: SIGUSR1: no CheckpointManager is there to save; the run "
      "continues\n";
  const int saved = errno;
  if (write(STDERR_FILENO, kText, sizeof(kText) - 1) < 0) errno = 0;
  errno = saved;
}

void HandleIfDefault(int sig, void (*handler)(int)) {
  struct sigaction act;
  if (sigaction(sig, nullptr, &act) != 0 || (act.sa_flags & SA_SIGINFO) != 0 ||
      act.sa_handler != SIG_DFL) {
    return;
  }
  memset(&act, 0, sizeof(act));
  act.sa_handler = handler;
  act.sa_flags = SA_RESTART;
  sigaction(sig, &act, nullptr);
}

// This runs before main, since a program opens its files before it calls Init:
// none of them may become descriptor 0, 1 or 2.
const bool g_opened = [] {
  OpenStandardDescriptors();
  return true;
}();

}  // namespace

void OpenStandardDescriptors() {
  const int saved = errno;
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(fd, F_GETFD) >= 0 || errno != EBADF) continue;
    // open() returns the lowest free number, which is this one: those below are
    // open.
    if (open("/dev/null", O_RDWR) < 0) break;
  }
  errno = saved;
}

void SurviveSignals() {
  HandleIfDefault(SIGPIPE, OnPipe);
  HandleIfDefault(SIGUSR1, OnNotice);
}

bool IsSurvived(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) == 0 && action.sa_handler == OnNotice;
}

}  // namespace tessera
