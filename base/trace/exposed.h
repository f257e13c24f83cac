// Exposed waits: for how long threads of the program were blocked by what was
// not yet there. What a collective takes beside computing costs nothing; what
// is exposed makes the step longer.
//
//   communication   |== all-gather of unit b ==|
//   the program     |-- computes a --|..waits..|-- computes b --|
//                                     exposed
//
// Always on: two looks at the clock and one addition for each wait that
// blocks, nothing for one that does not. It is of the process, over all of its
// engines and groups, and never goes back: who asks twice has the time between.
//
// Threads: any. Threads that base/thread has started (the communication thread,
// a save's) wait at nobody's cost: not counted.
//
// Of tensors of a device: what the host has waited until collectives were given
// to the device. What the device's streams wait for among themselves the host
// does not know.
#ifndef BASE_TRACE_EXPOSED_H_
#define BASE_TRACE_EXPOSED_H_

#include <cstdint>

#include "absl/strings/string_view.h"

namespace tessera {

// Why a thread waits.
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
// From kUpdate on it is no communication.
inline constexpr int kNumCommReasons = 5;

absl::string_view WaitReasonName(WaitReason reason);  // "gather"

// Nanoseconds since the process began: of all communication, and of one reason.
int64_t ExposedCommNanos();
int64_t ExposedNanos(WaitReason reason);

// A wait has ended, for `what` ("all-gather of unit a"); begin and end are
// TraceNow(). Also a span of the trace, if one is recorded.
void NoteExposedWait(WaitReason reason, absl::string_view what, int64_t begin,
                     int64_t end);

// Whether waits of this thread count.
bool WaitsAreExposed();

// MonotonicNow() in nanoseconds.
int64_t TraceNow();

}  // namespace tessera
#endif  // BASE_TRACE_EXPOSED_H_
