// Progress shows people how training goes, from rank 0: on a terminal one
// line that is redrawn, elsewhere a line now and then.
//
//   [######......]  60/120  01:02<01:04  loss 2.4432  lr 0.003  1910 tok/s
//                           so far, left
//
//   tessera::Progress progress(engine.get(), {.steps = steps});
//   while (engine->step() < steps) {
//     ...
//     TESSERA_RETURN_IF_ERROR(engine->Backward(loss));
//     TESSERA_RETURN_IF_ERROR(engine->Step());
//     TESSERA_RETURN_IF_ERROR(progress.Show(loss));
//   }
//
// The loss is the mean over the ranks and the micro-batches of a step. The
// speed is that of all ranks since the first step shown, which warms up:
// samples per second, or tokens per second and, where the peak of the device is
// known, MFU, if the program has called Monitor::SetTokensPerSample.
//
// Threads: as for the engine, one at a time.
#ifndef ENGINE_PROGRESS_H_
#define ENGINE_PROGRESS_H_

#include <cstdint>
#include <cstdio>
#include <string>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/monotonic.h"
#include "monitor/progress_bar.h"  // IWYU pragma: export

namespace tessera {

class Engine;  // engine/engine.h

// Options of Progress.
struct ProgressOptions {
  int64_t steps = 0;  // of the run, as Engine::step() counts; 0: not known
  // Where rank 0 writes; borrowed. nullptr: nowhere.
  std::FILE* out = stdout;
  // Without a terminal this many steps pass between two lines. 0: as
  // steps_per_print says, or if that is not set at every tenth of `steps`.
  int64_t line_each = 0;
  Clock clock = MonotonicNow;
};

// Shows the steps of one engine.
class Progress {
 public:
  // `engine` outlives it. Make it just before the loop, on all ranks with the
  // same steps and line_each. LOCAL.
  explicit Progress(Engine* engine, ProgressOptions options = {});
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Adds the loss of a micro-batch (a scalar; undefined on a rank that had no
  // data) and, if a step has ended since the last call, shows the step. Call it
  // after Engine::Step. `words`, one line of ASCII, come last. COLLECTIVE and
  // blocking at the first step shown, at each step that gets a line, and every
  // ten steps, when ranks exchange their losses; otherwise LOCAL, without
  // waiting for a device. Returns the error of the exchange, and on all ranks
  // InvalidArgument where the losses of some rank since the last one cannot be
  // read.
  absl::Status Show(const at::Tensor& loss, absl::string_view words = "");
  // Whether Show, called after the step that has just ended, exchanges the
  // losses: for `words` that take time to make. The same on all ranks. LOCAL.
  bool IsDue() const;
  // Writes a whole line on rank 0, above the bar. LOCAL.
  void Say(absl::string_view line) { bar_.Say(line); }

  // Returns the loss that was exchanged last, the same on all ranks; NaN before
  // that. LOCAL.
  double loss() const { return loss_; }
  // Return the speed of all ranks at the last step; 0: not known. LOCAL.
  double samples_per_second() const { return samples_per_second_; }
  double tokens_per_second() const;

 private:
  void Add(const at::Tensor& loss);
  absl::Status Exchange();
  void EndStep(int64_t updates);
  std::string Speed() const;

  Engine* const engine_;
  const Clock clock_;
  ProgressBar bar_;
  at::Tensor sum_;             // [], float64: losses of this rank in the step
  int64_t losses_ = 0;         // how many these are
  absl::Status unread_;        // why one could not be added
  int64_t step_ = -1;          // Engine::step_at_most() of the last step
  int64_t updates_ = 0;        // Engine::updates() at the last step shown
  int64_t first_updates_ = 0;  // and at the first; 0: none is shown yet
  absl::Duration begin_, first_end_;
  double loss_;
  double samples_per_second_ = 0;
  std::string text_;  // made at the last exchange
};

}  // namespace tessera
#endif  // ENGINE_PROGRESS_H_
