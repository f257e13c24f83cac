// ProgressBar shows a person the progress of a run: on a terminal one line that
// is redrawn, elsewhere a line now and then.
//
//   [######......]  60/120  01:02<01:04  loss 2.4432  1910 tok/s
//                           so far, left     the program's own words
//
// For any loop:
//
//   tessera::ProgressBar bar(world->rank() == 0 ? stderr : nullptr, steps);
//   for (...) bar.Show(step, absl::StrFormat("loss %.4f", loss));
//
// Threads: none; calls come from one thread at a time.
#ifndef MONITOR_PROGRESS_BAR_H_
#define MONITOR_PROGRESS_BAR_H_

#include <cstdint>
#include <cstdio>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/monotonic.h"

namespace tessera {

struct ProgressBarOptions {
  // Without a terminal, a line is written every line_each steps. 0: at every
  // tenth of the total, or every 10 steps if the number of steps is not known.
  int64_t line_each = 0;
  Clock clock = MonotonicNow;
};

class ProgressBar {
 public:
  // `out` is borrowed; nullptr: nothing is written. `total_steps` of 0 or less:
  // unknown.
  ProgressBar(std::FILE* out, int64_t total_steps,
              ProgressBarOptions options = {});
  // Ends the line that is being drawn.
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  // Returns true at step 1, at the last, and at regular steps in between.
  // Without a terminal these are the steps at which a line is written, besides
  // the first one shown. The same on all ranks.
  bool IsDue(int64_t step) const;
  // Shows that `step` steps are done, from 1 on; `words` is one line of ASCII.
  // The remaining time is shown from the second step on; it follows from the
  // steps since the first, which includes the warm-up.
  void Show(int64_t step, absl::string_view words);
  // Writes a whole line; the bar goes on below it.
  void Say(absl::string_view line);

  // Returns the line for a terminal of `columns` columns.
  std::string Line(int64_t step, absl::string_view words, int columns) const;

 private:
  void Draw(int64_t step, absl::string_view words);
  std::string Times(int64_t step) const;

  std::FILE* const out_;
  const int64_t total_steps_;
  const ProgressBarOptions options_;
  const bool terminal_;
  bool drawing_ = false;  // the terminal shows a line without its end
  const absl::Duration begin_;
  int64_t first_step_ = 0;  // the first step shown; 0: none yet
  absl::Duration first_end_, drawn_;
};

// Returns "05:12", "1:05:12" or "3d 01:05:12".
std::string ClockText(absl::Duration time);

}  // namespace tessera
#endif  // MONITOR_PROGRESS_BAR_H_
