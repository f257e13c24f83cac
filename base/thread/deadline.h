// Deadline is the moment until which something is waited for. It follows the
// monotonic clock, so setting the host's clock neither ends nor prolongs a
// wait.
//
//   const Deadline deadline = Deadline::After(absl::Seconds(20));
//   while (!done() && !deadline.HasPassed()) absl::SleepFor(kPoll);
//
// Suspending the host suspends the deadline, too.
#ifndef BASE_THREAD_DEADLINE_H_
#define BASE_THREAD_DEADLINE_H_

#include "absl/time/time.h"
#include "base/monotonic.h"

namespace tessera {

class Deadline {
 public:
  static Deadline After(absl::Duration time) {
    return Deadline(MonotonicNow() + time);
  }
  static Deadline Never() { return Deadline(absl::InfiniteDuration()); }

  bool HasPassed() const { return MonotonicNow() >= at_; }
  // Returns the time left: 0 or less once it has passed.
  absl::Duration Left() const { return at_ - MonotonicNow(); }

  friend Deadline operator+(Deadline deadline, absl::Duration later) {
    return Deadline(deadline.at_ + later);
  }
  friend bool operator<(Deadline a, Deadline b) { return a.at_ < b.at_; }

 private:
  explicit Deadline(absl::Duration at) : at_(at) {}
  absl::Duration at_;
};

}  // namespace tessera
#endif  // BASE_THREAD_DEADLINE_H_
