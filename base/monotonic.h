// MonotonicNow: time that only goes forward.
#ifndef BASE_MONOTONIC_H_
#define BASE_MONOTONIC_H_

#include <chrono>

#include "absl/time/time.h"

namespace tessera {

// Since some fixed moment of this host, the same for its processes; unlike
// absl::Now() nobody can set it.
inline absl::Duration MonotonicNow() {
  return absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
}

}  // namespace tessera
#endif  // BASE_MONOTONIC_H_
