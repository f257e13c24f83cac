// Sets up what every process needs, whoever has started it: descriptors 0, 1
// and 2 are open, and neither a reader who has gone nor SIGUSR1 ends a run.
#ifndef BASE_SYSTEM_PROCESS_DEFAULTS_H_
#define BASE_SYSTEM_PROCESS_DEFAULTS_H_

#include <signal.h>

namespace tessera {

// Opens /dev/null at whichever of descriptors 0, 1 and 2 is closed, as a daemon
// or ssh may leave them: otherwise the next socket or file would get that
// number, and the lines of the log would go there. Every program that links
// this does it before main, and Init does it again. LOCAL.
void OpenStandardDescriptors();

// From here on SIGPIPE does not end the process (the write fails with EPIPE),
// and SIGUSR1 only writes a line to stderr, where either would have ended this
// process. Programs that are executed from here keep the previous handling.
// LOCAL.
void SurviveSignals();

// Returns whether SurviveSignals handles SIGUSR1, that is, whether nobody else
// wants it.
bool IsSurvived(const struct sigaction& action);

}  // namespace tessera
#endif  // BASE_SYSTEM_PROCESS_DEFAULTS_H_
