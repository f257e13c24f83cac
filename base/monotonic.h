// MonotonicNow: time that only goes forward; and clocks that may be given
// instead of it.
#ifndef BASE_MONOTONIC_H_
#define BASE_MONOTONIC_H_

#include <chrono>
#include <functional>

#include "absl/time/time.h"

namespace tessera {

// Since some fixed moment of this host, the same for its processes; unlike
// absl::Now() nobody can set it.
inline absl::Duration MonotonicNow() {
  return absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
}

// What is asked for the time: MonotonicNow, or in tests a clock that is moved
// by hand. Any thread may call it.
using Clock = std::function<absl::Duration()>;

}  // namespace tessera
#endif  // BASE_MONOTONIC_H_
