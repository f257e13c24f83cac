// Summarizes traces: how long steps took, how much of their communication was
// exposed, and why.
//
// The cause of a wait follows from the collective that was waited for; the
// parts are in the order in which it could have ended sooner:
//
//   wait            |---- queued ----|-- a peer is late --|---- transfer ----|
//   this rank's     call           begin                                    end
//   the last peer's                                      begin
//
//   queued     the communication thread was busy with others
//   peer late  it had begun here, but not yet on the last rank (known if that
//              rank's file is given and comes from the same host)
//   transfer   the rest: "not prefetched" for a gather that was not begun
//              ahead, "prefetched too late" for one that was
#ifndef REPORT_TRACE_SUMMARY_H_
#define REPORT_TRACE_SUMMARY_H_

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "report/trace_file.h"

namespace tessera {

enum class WaitCause : uint8_t {
  kQueued,
  kPeerLate,
  kNotPrefetched,
  kPrefetchedLate,
  kTransfer,
};
inline constexpr int kNumWaitCauses = 5;
absl::string_view WaitCauseName(WaitCause cause);  // "not prefetched"

// All times below are milliseconds.
struct StepSummary {
  int64_t step = 0;    // a skipped step has that of the step made in its place
  int64_t update = 0;  // steps made or skipped
  int rank = -1;       // -1: means over ranks
  double total = 0;
  double forward = 0, backward = 0, optimizer = 0;  // phases
  double communication = 0;  // with at least one collective or pull under way
  double hidden = 0;         // part of it, while the program was not waiting
  double exposed = 0;        // the program was blocked by communication
  double recompute = 0;
  double disk_read = 0, disk_write = 0;  // with at least one under way
  double disk_wait = 0, update_wait = 0;
  int64_t disk_bytes_read = 0, disk_bytes_written = 0;  // of all ranks together
  std::map<std::string, double> exposed_by_reason;      // "gather", ...
};

// The times of a step, with their names in JSON.
struct StepTime {
  const char* name;
  double StepSummary::*ms;
};
inline constexpr StepTime kStepTimes[] = {
    {"total", &StepSummary::total},
    {"forward", &StepSummary::forward},
    {"backward", &StepSummary::backward},
    {"optimizer", &StepSummary::optimizer},
    {"communication", &StepSummary::communication},
    {"hidden", &StepSummary::hidden},
    {"exposed", &StepSummary::exposed},
    {"recompute", &StepSummary::recompute},
    {"disk_read", &StepSummary::disk_read},
    {"disk_write", &StepSummary::disk_write},
    {"disk_wait", &StepSummary::disk_wait},
    {"update_wait", &StepSummary::update_wait},
};

// Returns the mean of some steps, of which there is at least one, except that
// bytes are added up.
StepSummary MeanOf(const std::vector<const StepSummary*>& of);

// Waits for one thing, over all steps and ranks.
struct WaitSummary {
  std::string reason, unit, what;  // unit: "" for none
  int64_t count = 0;
  double total = 0, longest = 0;
  int64_t ahead = 0;  // how many of them had their gather started ahead
  double lead = 0;    // mean time between such a start and the wait
  std::array<double, kNumWaitCauses> by_cause{};  // of total
  std::map<int, double> by_late_rank;             // for kPeerLate
};

struct RankSummary {
  int rank = 0;
  double step = 0;           // mean
  double work = 0;           // part of it without exposed waits
  double exposed = 0;        // mean of a step
  double others_waited = 0;  // mean over steps of the sum over other ranks
};

struct TraceSummary {
  int world_size = 1;
  std::vector<int> ranks;
  std::vector<StepSummary> steps;    // means, in order
  std::vector<StepSummary> by_rank;  // each step of each rank
  std::vector<WaitSummary> waits;    // the largest total first
  std::vector<RankSummary> rank_summaries;
  std::vector<std::string> notes;  // for people
};

// Returns InvalidArgument if two files belong to one rank, or none has a whole
// step.
absl::StatusOr<TraceSummary> Summarize(absl::Span<const TraceFile> files);

// Return tables for people, with at most `most_waits` rows of waits, and all of
// it as JSON.
std::string SummaryToText(const TraceSummary& summary, int most_waits);
std::string SummaryToJson(const TraceSummary& summary);

}  // namespace tessera
#endif  // REPORT_TRACE_SUMMARY_H_
