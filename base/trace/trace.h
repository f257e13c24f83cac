// The trace records what this process did when, as spans on named tracks.
//
//   main           | forward          | backward             | optimizer step |
//                  |..wait..|  |recompute|     |..wait..|
//   gather         |= unit a =|  |= unit b =|
//   communication  |- all-gather of unit a -|- ... of unit b -|
//
//   const TraceScope scope(TraceTrack::kReduce, "pack gradients", unit, bytes);
//
// There is one recording at a time in a process, over all of its engines.
// Without one, a scope costs one relaxed load and a branch. With one, a span
// costs two looks at the clock and a short lock: tens of nanoseconds, beside
// work of a hundred microseconds. Spans are kept in memory, at most kMaxSpans
// of them; whoever ends the recording takes them (trace_json.h writes them).
//
// Threads: any.
#ifndef BASE_TRACE_TRACE_H_
#define BASE_TRACE_TRACE_H_

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "base/trace/exposed.h"

namespace tessera {

// TraceTrack is where a span is drawn; the order is that of the rows.
enum class TraceTrack : uint8_t {
  kSteps,          // whole steps
  kMain,           // what the program's thread does: phases and waits
  kUnits,          // which unit it uses
  kGather,         // of a unit, from the start until its values are taken
  kCommunication,  // collectives, while they run
  kPulls,          // one-sided gathers, several at a time
  kReduce,         // of gradients, from the start until they are taken
  kFree,           // memory of units goes
  kStep,           // parts of the optimizer's step
  kHostUpdate,     // the update stream's
  kDiskRead,
  kDiskWrite,
  kCheckpoint,
};
inline constexpr int kNumTraceTracks = 13;
absl::string_view TraceTrackName(TraceTrack track);

// Times are TraceNow().
struct TraceSpan {
  TraceTrack track = TraceTrack::kMain;
  std::string name;
  int64_t begin = 0, end = 0;
  std::string unit;    // "" if of none
  int64_t bytes = -1;  // negative: unknown
  // More members of a JSON object, without the braces: "\"step\":3".
  std::string args;
};

namespace trace_internal {
extern std::atomic<bool> g_records;
}  // namespace trace_internal

// Returns whether spans are kept now.
inline bool TraceRecords() {
  return trace_internal::g_records.load(std::memory_order_relaxed);
}

// Keeps a span that has ended, while there is a recording.
void AddTraceSpan(TraceSpan span);

// Returns the unit in a collective's description: "blocks.3" of "all-gather of
// unit blocks.3"; "" where the text names none.
absl::string_view UnitInText(absl::string_view text);

// Records a span from its construction to its destruction. `name` and `unit`
// outlive it.
class TraceScope {
 public:
  TraceScope(TraceTrack track, absl::string_view name,
             absl::string_view unit = {}, int64_t bytes = -1) {
    if (TraceRecords()) Begin(track, name, unit, bytes);
  }
  ~TraceScope() {
    if (begin_ != 0) End();
  }
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

 private:
  void Begin(TraceTrack track, absl::string_view name, absl::string_view unit,
             int64_t bytes);
  void End();

  TraceTrack track_;
  absl::string_view name_, unit_;
  int64_t bytes_;
  int64_t begin_ = 0;  // 0: not recorded
};

// What a recording holds.
struct TraceRecording {
  static constexpr size_t kMaxSpans = 1 << 19;

  int64_t begin = 0, end = 0;
  std::vector<TraceSpan> spans;  // in the order of their ends
  int64_t left_out = 0;          // after kMaxSpans
};

// Begins a recording; false if there is one already.
bool StartTrace();
// Ends the recording and returns it; empty if there is none.
TraceRecording StopTrace();

}  // namespace tessera
#endif  // BASE_TRACE_TRACE_H_
