#include "report/trace_summary.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "report/intervals.h"

namespace tessera {
namespace {

bool IsCollective(const SpanRecord& event) {
  return event.track == "communication" || event.track == "pulls";
}
bool IsCommWait(const SpanRecord& event) {
  return !event.wait.empty() && event.wait != "disk" && event.wait != "update";
}
Interval TimeOf(const SpanRecord& event) { return {event.begin, event.end}; }

// One collective on all ranks whose files are given.
using CollectiveKey = std::tuple<std::string, int64_t, std::string>;
CollectiveKey KeyOf(const SpanRecord& event) {
  return {event.group, event.sequence, event.name};
}

using Spans = std::map<std::string, std::vector<const SpanRecord*>>;

// Returns the span of that name that overlaps the wait most; null: none.
template <typename Time>
const SpanRecord* MostOverlapping(const SpanRecord& wait, const Spans& spans,
                                  const std::string& name, const Time& time) {
  const auto found = spans.find(name);
  if (found == spans.end()) return nullptr;
  const SpanRecord* best = nullptr;
  double most = 0;
  for (const SpanRecord* const each : found->second) {
    const double with = Overlap(TimeOf(wait), time(*each));
    if (with > most) best = each;
    most = std::max(most, with);
  }
  return best;
}

// Finds what a file's waits waited for.
struct Index {
  explicit Index(const TraceFile& file) : of(file) {
    for (const SpanRecord& event : file.events) {
      if (IsCollective(event)) collectives[event.name].push_back(&event);
      if (event.track == "gather") gathers[event.unit].push_back(&event);
      if (event.track == "communication") by_key[KeyOf(event)] = &event;
    }
  }

  // Returns the collective that the wait was for, from its call on; null: none.
  const SpanRecord* CollectiveOf(const SpanRecord& wait,
                                 absl::string_view what) const {
    return MostOverlapping(wait, collectives, std::string(what),
                           [](const SpanRecord& each) -> Interval {
                             return {each.begin - each.queued, each.end};
                           });
  }
  // Returns the gather that ends with the wait; null: none.
  const SpanRecord* GatherOf(const SpanRecord& wait) const {
    return MostOverlapping(wait, gathers, wait.unit, TimeOf);
  }

  const TraceFile& of;
  Spans collectives;  // by name
  Spans gathers;      // by unit
  std::map<CollectiveKey, const SpanRecord*> by_key;
};

struct Late {
  int rank = -1;  // -1: nobody
  double begin = 0;
};

// Finds the rank that came last to a collective, among ranks of the same host.
Late LastOf(const SpanRecord& collective, const Index& mine,
            const std::vector<Index>& all) {
  Late late = {-1, collective.begin};
  if (collective.track != "communication") return late;
  for (const Index& other : all) {
    if (&other == &mine || other.of.host != mine.of.host) continue;
    const auto found = other.by_key.find(KeyOf(collective));
    if (found != other.by_key.end() && found->second->begin > late.begin) {
      late = {other.of.rank, found->second->begin};
    }
  }
  return late;
}

class Summing {
 public:
  explicit Summing(absl::Span<const TraceFile> files) {
    for (const TraceFile& file : files) indices_.emplace_back(file);
  }

  void Run(TraceSummary* summary) {
    for (const Index& index : indices_) {
      for (const SpanRecord& event : index.of.events) {
        if (event.track == "steps") AddStep(index, event, summary);
        if (IsCommWait(event)) AddWait(index, event);
      }
    }
    for (auto& [key, wait] : waits_) {
      if (wait.ahead > 0) wait.lead /= static_cast<double>(wait.ahead);
      summary->waits.push_back(std::move(wait));
    }
    std::stable_sort(summary->waits.begin(), summary->waits.end(),
                     [](const WaitSummary& a, const WaitSummary& b) {
                       return a.total > b.total;
                     });
  }

  // By rank, how long others have waited for it.
  const std::map<int, double>& late() const { return late_; }

 private:
  static void AddStep(const Index& index, const SpanRecord& step,
                      TraceSummary* summary) {
    StepSummary sum;
    sum.step = step.step;
    sum.update = step.update;
    sum.rank = index.of.rank;
    sum.total = (step.end - step.begin) / 1e3;
    IntervalSet communication, waits, reads, writes;
    for (const SpanRecord& event : index.of.events) {
      const Interval part = {std::max(event.begin, step.begin),
                             std::min(event.end, step.end)};
      if (part.end <= part.begin) continue;
      const double ms = (part.end - part.begin) / 1e3;
      if (IsCollective(event)) communication.Add(part);
      if (IsCommWait(event)) {
        waits.Add(part);
        sum.exposed += ms;
        sum.exposed_by_reason[event.wait] += ms;
      }
      if (event.wait == "disk") sum.disk_wait += ms;
      if (event.wait == "update") sum.update_wait += ms;
      if (event.track == "main") {
        if (event.name == "forward") sum.forward += ms;
        if (event.name == "backward") sum.backward += ms;
        if (event.name == "optimizer step") sum.optimizer += ms;
        if (event.name == "compute again") sum.recompute += ms;
      }
      const bool ends_here = event.end <= step.end && event.end > step.begin;
      const int64_t bytes = ends_here ? std::max<int64_t>(0, event.bytes) : 0;
      if (event.track == "disk read") {
        reads.Add(part);
        sum.disk_bytes_read += bytes;
      }
      if (event.track == "disk write") {
        writes.Add(part);
        sum.disk_bytes_written += bytes;
      }
    }
    for (IntervalSet* const set : {&communication, &waits, &reads, &writes}) {
      set->Close();
    }
    sum.communication = communication.length() / 1e3;
    sum.hidden = sum.communication - communication.LengthWith(waits) / 1e3;
    sum.disk_read = reads.length() / 1e3;
    sum.disk_write = writes.length() / 1e3;
    summary->by_rank.push_back(std::move(sum));
  }

  void AddWait(const Index& index, const SpanRecord& wait) {
    absl::string_view what = wait.name;
    absl::ConsumePrefix(&what, "wait: ");
    WaitSummary& sum =
        waits_[{wait.wait, wait.unit.empty() ? std::string(what) : wait.unit}];
    if (sum.count == 0) {
      sum.reason = wait.wait;
      sum.unit = wait.unit;
      sum.what = std::string(what);
    }
    ++sum.count;
    const double ms = (wait.end - wait.begin) / 1e3;
    sum.total += ms;
    sum.longest = std::max(sum.longest, ms);
    Explain(index, wait, what, &sum);
  }

  void Explain(const Index& index, const SpanRecord& wait,
               absl::string_view what, WaitSummary* sum) {
    const auto add = [&](WaitCause cause, double us) {
      sum->by_cause[static_cast<size_t>(cause)] += us / 1e3;
    };
    WaitCause rest = WaitCause::kTransfer;
    if (wait.wait == "gather") {
      const SpanRecord* const gather = index.GatherOf(wait);
      const bool ahead = gather != nullptr && gather->ahead;
      rest = ahead ? WaitCause::kPrefetchedLate : WaitCause::kNotPrefetched;
      if (ahead) {
        ++sum->ahead;
        sum->lead += std::max(0.0, wait.begin - gather->begin) / 1e3;
      }
    }
    const SpanRecord* const collective = index.CollectiveOf(wait, what);
    double left = wait.end - wait.begin;
    if (collective != nullptr) {
      const double queued =
          Overlap(TimeOf(wait),
                  {collective->begin - collective->queued, collective->begin});
      add(WaitCause::kQueued, queued);
      const Late late = LastOf(*collective, index, indices_);
      const double for_peer =
          Overlap(TimeOf(wait),
                  {collective->begin, std::min(late.begin, collective->end)});
      add(WaitCause::kPeerLate, for_peer);
      if (for_peer > 0) {
        sum->by_late_rank[late.rank] += for_peer / 1e3;
        late_[late.rank] += for_peer / 1e3;
      }
      left -= queued + for_peer;
    }
    add(rest, std::max(0.0, left));
  }

  std::vector<Index> indices_;
  std::map<std::pair<std::string, std::string>, WaitSummary> waits_;
  std::map<int, double> late_;
};

void AddMeans(TraceSummary* summary) {
  std::map<int64_t, std::vector<const StepSummary*>> updates;
  for (const StepSummary& each : summary->by_rank) {
    updates[each.update].push_back(&each);
  }
  for (const auto& [update, of] : updates) summary->steps.push_back(MeanOf(of));
}

void AddRanks(const std::map<int, double>& late, TraceSummary* summary) {
  for (const int rank : summary->ranks) {
    RankSummary sum;
    sum.rank = rank;
    double n = 0;
    for (const StepSummary& each : summary->by_rank) {
      if (each.rank != rank) continue;
      ++n;
      sum.step += each.total;
      sum.exposed += each.exposed;
    }
    if (n == 0) continue;
    sum.step /= n;
    sum.exposed /= n;
    sum.work = sum.step - sum.exposed;
    const auto found = late.find(rank);
    if (found != late.end()) sum.others_waited = found->second / n;
    summary->rank_summaries.push_back(sum);
  }
}

void AddNotes(absl::Span<const TraceFile> files, TraceSummary* summary) {
  std::set<std::string> hosts;
  for (const TraceFile& file : files) {
    hosts.insert(file.host);
    if (file.left_out > 0) {
      summary->notes.push_back(
          absl::StrCat(file.path, ": ", file.left_out,
                       " spans were left out; record fewer steps"));
    }
  }
  const int given = static_cast<int>(files.size());
  if (given < summary->world_size) {
    summary->notes.push_back(absl::StrCat(
        "files of ", given, " of ", summary->world_size,
        " ranks: whether a wait was for a rank that came late is known only "
        "among ranks whose files are given"));
  }
  if (hosts.size() > 1) {
    summary->notes.push_back(
        "files of several hosts: their clocks differ, so who came late is "
        "compared within each host");
  }
}

}  // namespace

StepSummary MeanOf(const std::vector<const StepSummary*>& of) {
  StepSummary mean;
  mean.step = of[0]->step;
  mean.update = of[0]->update;
  const double n = static_cast<double>(of.size());
  for (const StepSummary* const each : of) {
    for (const StepTime& time : kStepTimes) {
      mean.*time.ms += each->*time.ms / n;
    }
    mean.disk_bytes_read += each->disk_bytes_read;
    mean.disk_bytes_written += each->disk_bytes_written;
    for (const auto& [reason, ms] : each->exposed_by_reason) {
      mean.exposed_by_reason[reason] += ms / n;
    }
  }
  return mean;
}

absl::string_view WaitCauseName(WaitCause cause) {
  constexpr absl::string_view kNames[kNumWaitCauses] = {
      "queued behind others", "a rank came late", "not prefetched",
      "prefetched too late", "transfer"};
  return kNames[static_cast<size_t>(cause)];
}

absl::StatusOr<TraceSummary> Summarize(absl::Span<const TraceFile> files) {
  TraceSummary summary;
  for (const TraceFile& file : files) {
    if (std::find(summary.ranks.begin(), summary.ranks.end(), file.rank) !=
        summary.ranks.end()) {
      return absl::InvalidArgumentError(absl::StrCat(
          file.path, ": rank ", file.rank,
          " is there twice; give the files of one run, each once"));
    }
    summary.ranks.push_back(file.rank);
    if (file.world_size != files[0].world_size) {
      return absl::InvalidArgumentError(absl::StrCat(
          file.path, ": is of ", file.world_size, " ranks, ", files[0].path,
          " of ", files[0].world_size,
          "; give the files of one run, and remove those of earlier ones"));
    }
    summary.world_size = file.world_size;
  }
  std::sort(summary.ranks.begin(), summary.ranks.end());
  Summing summing(files);
  summing.Run(&summary);
  if (summary.by_rank.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(files.empty() ? "no file" : files[0].path,
                     ": no whole step was recorded (did the run end before "
                     "trace.start_step, or within it?)"));
  }
  AddMeans(&summary);
  AddRanks(summing.late(), &summary);
  AddNotes(files, &summary);
  return summary;
}

}  // namespace tessera
