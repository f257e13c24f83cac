#include "base/thread/monotonic_wait.h"

#include <algorithm>
#include <chrono>

#include "base/monotonic.h"

namespace tessera {

bool MonotonicMutex::AwaitFor(const absl::Condition& condition,
                              absl::Duration timeout) {
  // Longer waits would be beyond the clock's range.
  constexpr absl::Duration kLongest = absl::Hours(24 * 365 * 50);
  if (condition.Eval()) return true;
  // The waits of std are used: with steady_clock they are
  // pthread_cond_clockwait.
  std::unique_lock<std::mutex> lock(mutex_, std::adopt_lock);
  const auto until = std::chrono::steady_clock::time_point(
      absl::ToChronoNanoseconds(MonotonicNow() + std::min(timeout, kLongest)));
  ++waiting_;
  // Other waiting threads have to look at what was changed before.
  if (waiting_ > 1) changed_.notify_all();
  const bool met =
      changed_.wait_until(lock, until, [&] { return condition.Eval(); });
  --waiting_;
  lock.release();
  return met;
}

}  // namespace tessera
