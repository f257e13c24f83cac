// Counts how long this process has waited for its data: data loaders add to it,
// whoever reports steps reads it.
//
//   const int64_t before = DataWaitNanos();
//   ... steps ...
//   const int64_t waited = DataWaitNanos() - before;
//
// Threads: any. Costs one relaxed load or addition. LOCAL.
#ifndef BASE_THREAD_WAIT_CLOCK_H_
#define BASE_THREAD_WAIT_CLOCK_H_

#include <cstdint>

namespace tessera {

// Returns the sum of what AddDataWait was given since the process began. It
// only grows.
int64_t DataWaitNanos();

// Adds a wait once it is over; a loader that did not have to wait adds 0.
// REQUIRES: nanos >= 0.
void AddDataWait(int64_t nanos);
// Returns whether anything has called AddDataWait; if not, nobody reports
// waits.
bool DataWaitIsTold();

}  // namespace tessera
#endif  // BASE_THREAD_WAIT_CLOCK_H_
