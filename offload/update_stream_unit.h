// UpdateStream::Unit: what the stream knows about one unit (update_stream.cc,
// update_stream_thread.cc, update_stream_reads.cc).
#ifndef OFFLOAD_UPDATE_STREAM_UNIT_H_
#define OFFLOAD_UPDATE_STREAM_UNIT_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "base/stream/stream_point.h"
#include "comm/comm_promise.h"
#include "offload/disk/swap_file.h"
#include "offload/tiered_buffer.h"
#include "offload/update_stream.h"

namespace tessera {

struct UpdateStream::Unit {
  // The progress of the unit.
  enum class Stage : uint8_t { kQueued, kReading, kComputed, kWritten };
  // Whether the update is kept. kCertain: it was pushed by Push. The others
  // were pushed early: they are undecided (kSpeculative), kept (then their
  // changed states are flipped) or dropped.
  enum class Fate : uint8_t { kCertain, kSpeculative, kKept, kDropped };

  // Where a state is read and written, from Push on.
  struct Place {
    SwapExtent from, to;
    bool zeros = false;
  };

  // Whether it reads what `foreseen` does, before it reads anything else.
  bool ReadsFirst(const Unit& foreseen) const;

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
  int64_t drains = 0;                           // before it was pushed
  int64_t number = 0;                           // of pushes before it
  std::shared_ptr<void> held;                   // until it is computed
  int64_t numel_computed = 0;                   // without an error
  std::vector<std::shared_ptr<Fetch>> fetches;  // of the rest of it
};

// Waits for all futures and clears the list.
absl::Status WaitForAll(std::vector<SwapFuture>* futures);
bool AllDone(const std::vector<SwapFuture>& futures);

}  // namespace tessera
#endif  // OFFLOAD_UPDATE_STREAM_UNIT_H_
