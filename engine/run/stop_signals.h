// StopSignals: notes signals that ask this process to end soon, so that a
// program saves its state first: SIGTERM, and SIGUSR1 as Slurm sends it
// (--signal).
#ifndef ENGINE_RUN_STOP_SIGNALS_H_
#define ENGINE_RUN_STOP_SIGNALS_H_

#include <signal.h>

#include <memory>
#include <string>

namespace tessera {

class StopSignals {
 public:
  // Makes such signals only noted until the object is destroyed; a repetition
  // of a signal, 5 seconds later or more, does what it did before. Handlers
  // that the program had installed are called, too; ignored signals stay
  // ignored. Returns null if there is a StopSignals already.
  static std::unique_ptr<StopSignals> Catch();
  // Restores the previous handlers.
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // Returns the signal that was received, or 0. LOCAL.
  int received() const;
  // Returns its name, such as "SIGTERM", or "". LOCAL.
  std::string name() const;

 private:
  StopSignals() = default;
};

}  // namespace tessera
#endif  // ENGINE_RUN_STOP_SIGNALS_H_
