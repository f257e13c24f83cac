// StreamUnit: what an update stream knows about the update of one unit
// (offload/update_stream.h), from Push to its last write.
#ifndef OFFLOAD_UPDATE_UNIT_H_
#define OFFLOAD_UPDATE_UNIT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/layout/layout.h"
#include "base/stream/stream_point.h"
#include "comm/comm_promise.h"
#include "offload/disk/swap_file.h"
#include "offload/tiered_buffer.h"

namespace tessera {

// The update of one unit.
struct StreamedUpdate {
  struct State {
    TieredBuffer* buffer = nullptr;
    bool read = true;     // false: `compute` writes all of it
    bool written = true;  // false: `compute` only reads it
  };
  int64_t numel = 0;
  std::string unit;  // for traces
  // The states, all on the stream's disk and of `numel` elements. They belong
  // to the stream, do not move and are not pushed again until Drain.
  std::vector<State> states;
  // Computes a slice: elements [slice.begin, slice.end) of states[i] lie at
  // data[i], and are written from there. Called on the stream's thread, slice
  // by slice; destroyed before the future ends.
  std::function<absl::Status(Range slice, const std::vector<char*>& data)>
      compute;
  // Called after the last slice: returns the point of a device's work at which
  // its changes there are done. Empty: nothing on a device was changed.
  std::function<StreamPoint()> end;
};

// New values that are being copied or read to memory.
class StreamFetch {
 public:
  StreamFetch(size_t state, char* to) : state_(state), to_(to) {}
  // Waits until they are there, and nothing writes to that memory any more.
  absl::Status Wait() const;

 private:
  friend class UpdateStream;
  const size_t state_;
  char* const to_;
  CommPromise taken_;  // of slices
  SwapFuture read_;    // of others
};

struct StreamUnit {
  // The progress of the unit.
  enum class Stage : uint8_t { kQueued, kReading, kComputed, kWritten };
  // Whether the update is kept. kCertain: it was pushed by Push. The others
  // were pushed early: they are undecided (kSpeculative), kept (then their
  // changed states are swapped with the next ones) or dropped.
  enum class Fate : uint8_t { kCertain, kSpeculative, kKept, kDropped };

  // Where a state is read and written, from Push on.
  struct Place {
    SwapExtent from, to;
    bool zeros = false;
  };

  // Makes the unit of an update, which is early if it goes to next values.
  static std::shared_ptr<StreamUnit> Of(StreamedUpdate update, bool early);
  // Makes a unit that only reads these states ahead.
  static std::shared_ptr<StreamUnit> Reading(
      const std::vector<TieredBuffer*>& states);
  // Whether it reads what `predicted` does, before it reads anything else.
  bool ReadsFirst(const StreamUnit& predicted) const;

  StreamedUpdate update;
  std::vector<Place> places;           // by state
  std::vector<TieredBuffer*> changed;  // by state; null: it is only read
  CommPromise computed, written;
  int64_t numel = 0;

  // Used by the thread only.
  int64_t numel_written = 0;
  StreamPoint end;      // of its update
  absl::Status status;  // the first error

  // Guarded by the stream's mutex.
  Stage stage = Stage::kQueued;
  Fate fate = Fate::kCertain;
  bool failed = false;
  int64_t drains = 0;                                 // before it was pushed
  int64_t number = 0;                                 // of pushes before it
  std::shared_ptr<void> held;                         // until it is computed
  int64_t numel_computed = 0;                         // without an error
  std::vector<std::shared_ptr<StreamFetch>> fetches;  // of the rest of it
};

}  // namespace tessera
#endif  // OFFLOAD_UPDATE_UNIT_H_
