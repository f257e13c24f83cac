// MemoryTimeline records what was held over the time of one step, and writes it
// to files.
//
//   samples   one for each change, until there are kMaxSamples; then pairs
//             are merged into the larger of the two, again and again: the peak
//             is always among them, and memory is bounded (1.3 MB)
//   phases    forward, backward, step
//   units     from a use of one unit to that of another; the first
//             kMaxSlices of them
//
// Threads: none of its own; the caller serializes the calls.
#ifndef BASE_STEP_MEMORY_MEMORY_TIMELINE_H_
#define BASE_STEP_MEMORY_MEMORY_TIMELINE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/step_memory/held_memory.h"

namespace tessera {

// Times are nanoseconds of MonotonicNow().
struct MemoryTimeline {
  static constexpr size_t kMaxSamples = 1 << 14;
  static constexpr size_t kMaxSlices = 1 << 15;

  struct Sample {
    int64_t at = 0;
    HeldMemory held;
  };
  struct Slice {
    std::string name;
    int64_t begin = 0, end = 0;
  };

  std::vector<Sample> samples;
  std::vector<Slice> phases, units;
  int64_t changes_per_sample = 1;
  int64_t slices_left_out = 0;  // of units
  int64_t step = 0;  // since the engine's Create, from 1; 0: not known
  StepMemoryReport report;

  void AddSample(const Sample& sample);
  void AddUnit(Slice slice);

 private:
  int64_t in_last_ = 0;  // changes
};

// Writes a JSON object for Perfetto or chrome://tracing: counters of what is
// held ("held": the sum, "by kind"), phases and units as slices. Times are
// microseconds of MonotonicNow(), as in traces (base/trace/trace_json.h), so
// that both can be opened together.
std::string ToChromeTrace(const MemoryTimeline& timeline, int rank);
// Writes a self-contained page (base/page/page_style.h): the kinds over time,
// one on top of the other, with phases below; what was held at the peak;
// activations by unit. `tessera report` finds it by its title.
std::string ToPage(const MemoryTimeline& timeline, int rank);

// Writes `prefix`RANK.json and `prefix`RANK.html.
absl::Status WriteTimeline(const MemoryTimeline& timeline,
                           absl::string_view prefix, int rank);

}  // namespace tessera
#endif  // BASE_STEP_MEMORY_MEMORY_TIMELINE_H_
