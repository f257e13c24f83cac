// StepClock: measures where the time of a step goes, by the host's clock, as an
// engine's calls divide it.
//
//   end of a Step .. forward .. | Backward: autograd, rest | .. | Step |
//
// On a device this is the time in which work is launched; only the time of a
// whole step is also the device's, since a program is at most one step ahead of
// it.
#ifndef ENGINE_OBSERVE_STEP_CLOCK_H_
#define ENGINE_OBSERVE_STEP_CLOCK_H_

#include <utility>

#include "absl/time/time.h"
#include "base/monotonic.h"
#include "engine/observe/step_record.h"

namespace tessera {

class StepClock {
 public:
  explicit StepClock(Clock clock = MonotonicNow)
      : clock_(std::move(clock)), step_begin_(clock_()), begin_(step_begin_) {}

  // Call these in this order; each marks the end of what was before. Returns
  // the seconds that this forward took.
  double EndForward() {
    const double before = times_.forward;
    begin_ = Add(&times_.forward);
    return times_.forward - before;
  }
  void EndAutograd() { (void)Add(&times_.autograd); }
  void EndBackward() { begin_ = Add(&times_.backward); }
  // A Step begins; the time between a Backward and it is counted nowhere.
  void BeginStep() { begin_ = clock_(); }
  // A Step ends that made no optimizer step.
  void EndMicroBatch() { begin_ = Add(&times_.update); }
  // Returns the times of the optimizer step that ends; the next one begins.
  StepTimes EndStep() {
    begin_ = Add(&times_.update);
    times_.step = absl::ToDoubleSeconds(begin_ - step_begin_);
    step_begin_ = begin_;
    return std::exchange(times_, {});
  }

 private:
  // Adds the time since begin_ to `to`. Returns the current time.
  absl::Duration Add(double* to) {
    const absl::Duration now = clock_();
    *to += absl::ToDoubleSeconds(now - begin_);
    return now;
  }

  const Clock clock_;
  absl::Duration step_begin_, begin_;
  StepTimes times_;
};

}  // namespace tessera
#endif  // ENGINE_OBSERVE_STEP_CLOCK_H_
