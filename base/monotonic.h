// MonotonicNow is time that only goes forward; a Clock may replace it.
#ifndef BASE_MONOTONIC_H_
#define BASE_MONOTONIC_H_

#include <chrono>
#include <functional>

#include "absl/time/time.h"

namespace tessera {

// Returns the time since some fixed moment of this host, which all its
// processes share. Unlike absl::Now() nobody can set it.
inline absl::Duration MonotonicNow() {
  return absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
}

// A Clock returns the time: MonotonicNow, or in tests a clock that is moved by
// hand. Any thread may call it.
using Clock = std::function<absl::Duration()>;

}  // namespace tessera
#endif  // BASE_MONOTONIC_H_
