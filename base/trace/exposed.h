// Exposed waits are the times for which threads of the program were blocked by
// data that was not there yet. A collective that overlaps with computation
// costs nothing; exposed time makes the step longer.
//
//   communication   |== all-gather of unit b ==|
//   the program     |-- computes a --|..waits..|-- computes b --|
//                                     exposed
//
// It is always on: a wait that blocks costs two looks at the clock and one
// addition, one that does not block costs nothing. The counters belong to the
// process, over all of its engines and groups, and never decrease: the
// difference of two readings is the time in between.
//
// Threads: any. Waits of threads that base/thread has started (the
// communication thread, a save's) delay nobody and are not counted.
//
// For tensors of a device it counts what the host waits until collectives have
// been given to the device. The host does not know what the device's streams
// wait for among themselves.
#ifndef BASE_TRACE_EXPOSED_H_
#define BASE_TRACE_EXPOSED_H_

#include <cstdint>

#include "absl/strings/string_view.h"

namespace tessera {

// WaitReason is why a thread waits.
enum class WaitReason : uint8_t {
  kGather,     // the values of a unit: an all-gather, a pull
  kReduction,  // the sum of gradients
  kAgreement,  // what all ranks have to say: errors, arrivals, norms
  kPublish,    // new values, after the step
  kOther,      // other collectives
  kUpdate,     // this rank's own update, on the host or a disk
  kDisk,       // reads and writes of this rank
};
inline constexpr int kNumWaitReasons = 7;
// Reasons from kUpdate on are not communication.
inline constexpr int kNumCommReasons = 5;

absl::string_view WaitReasonName(WaitReason reason);  // "gather"

// Return the nanoseconds since the process began, of all communication and of
// one reason.
int64_t ExposedCommNanos();
int64_t ExposedNanos(WaitReason reason);

// Records a wait that has ended, for `what` ("all-gather of unit a"); begin and
// end are TraceNow(). It is also a span of the trace, if one is recorded.
void NoteExposedWait(WaitReason reason, absl::string_view what, int64_t begin,
                     int64_t end);

// Returns whether waits of this thread count.
bool WaitsAreExposed();

// Returns MonotonicNow() in nanoseconds.
int64_t TraceNow();

}  // namespace tessera
#endif  // BASE_TRACE_EXPOSED_H_
