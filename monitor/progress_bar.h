// ProgressBar: what a person sees of a run while it trains. On a terminal one
// line that is drawn again and again, elsewhere a line now and then.
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
  // Off a terminal: a line at each so many steps. 0: at every tenth of the way,
  // or, where the number of steps is not known, at each 10.
  int64_t line_each = 0;
  Clock clock = MonotonicNow;
};

class ProgressBar {
 public:
  // `out` is borrowed; nullptr: nothing is written. `total_steps` of 0 or less:
  // nobody knows.
  ProgressBar(std::FILE* out, int64_t total_steps,
              ProgressBarOptions options = {});
  // Ends the line that is being drawn.
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  // True at step 1, at the last, and at every so many in between: when, off a
  // terminal, a line is written, and at the first that is shown. The same on
  // all ranks.
  bool IsDue(int64_t step) const;
  // `step` steps are done, from 1 on; `words`: one line, of ASCII. The time
  // that is left is told from the second step on, by those since the first,
  // which also warms up.
  void Show(int64_t step, absl::string_view words);
  // Writes a whole line; the bar goes on below it.
  void Say(absl::string_view line);

  // The line, in so many columns; of a terminal.
  std::string Line(int64_t step, absl::string_view words, int columns) const;

 private:
  void Draw(int64_t step, absl::string_view words);
  std::string Times(int64_t step) const;

  std::FILE* const out_;
  const int64_t total_steps_;
  const ProgressBarOptions options_;
  const bool terminal_;
  bool drawing_ = false;  // a line without its end is on the terminal
  const absl::Duration begin_;
  int64_t first_step_ = 0;  // that was shown; 0: none yet
  absl::Duration first_end_, drawn_;
};

// "05:12", "1:05:12", "3d 01:05:12"
std::string ClockText(absl::Duration time);

}  // namespace tessera
#endif  // MONITOR_PROGRESS_BAR_H_
