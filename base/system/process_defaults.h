// What every process of ours sees to, whoever has started it: that descriptors
// 0, 1 and 2 are open, and that neither a reader who has gone nor a notice ends
// a run.
#ifndef BASE_SYSTEM_PROCESS_DEFAULTS_H_
#define BASE_SYSTEM_PROCESS_DEFAULTS_H_

#include <signal.h>

namespace tessera {

// Opens /dev/null at whichever of descriptors 0, 1 and 2 is closed, as a daemon
// or ssh may leave them: the next socket or file would get that number, and the
// lines of the log would go there. Done before main in every program
// that this is linked into, and by Init. LOCAL.
void OpenStandardDescriptors();

// From here on SIGPIPE ends no write (it fails with EPIPE instead), and SIGUSR1
// is only said on stderr, where either would end this process. Programs that
// are executed from here have what they had. LOCAL.
void SurviveSignals();

// SIGUSR1 is handled so, that is, nobody else wants it.
bool IsSurvived(const struct sigaction& action);

}  // namespace tessera
#endif  // BASE_SYSTEM_PROCESS_DEFAULTS_H_
