// How long this process has waited for its data: data loaders add to it, who
// reports steps reads it.
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

// The sum of what AddDataWait was given since the process began. Only grows.
int64_t DataWaitNanos();

// By who may have waited, when it is over; also if it was for nothing, 0.
// REQUIRES: nanos >= 0.
void AddDataWait(int64_t nanos);
// Whether anything has called AddDataWait: else nobody tells of waits.
bool DataWaitIsTold();

}  // namespace tessera
#endif  // BASE_THREAD_WAIT_CLOCK_H_
