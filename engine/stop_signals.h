// StopSignals: notes that this process was told to end soon, so that a program
// saves its state first: SIGTERM, and SIGUSR1 as Slurm sends it (--signal).
#ifndef ENGINE_STOP_SIGNALS_H_
#define ENGINE_STOP_SIGNALS_H_

#include <signal.h>

#include <memory>

namespace tessera {

class StopSignals {
 public:
  // From here on, until this is destroyed, such signals are only noted; the
  // same one again, 5 seconds later or more, does what it did before. What the
  // program had installed itself is called, too. Those that are ignored stay
  // so. At most one at a time; null if there is one.
  static std::unique_ptr<StopSignals> Catch();
  // Puts back what was there.
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // 0, or the signal. LOCAL.
  int received() const;

 private:
  StopSignals() = default;
};

}  // namespace tessera
#endif  // ENGINE_STOP_SIGNALS_H_
