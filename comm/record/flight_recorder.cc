#include "comm/record/flight_recorder.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/log.h"

namespace tessera {
namespace {

ABSL_CONST_INIT absl::Mutex g_all_mutex(absl::kConstInit);

std::vector<const FlightRecorder*>& All()
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(g_all_mutex) {
  static auto* const all = new std::vector<const FlightRecorder*>;
  return *all;
}

// A failed check is told with what went before it.
std::string FatalContext() {
  constexpr int kLast = 8;
  return FlightRecorder::AllToText(/*wait=*/false, kLast);
}

std::string Ms(absl::Duration d) {
  return absl::StrFormat("%.3f ms", absl::ToDoubleMilliseconds(d));
}

std::string StateOf(const CollectiveRecord& record) {
  if (record.entered == absl::ZeroDuration()) return "queued";
  if (record.left == absl::ZeroDuration()) return "RUNNING";
  return record.status.ok() ? "done" : "FAILED";
}

std::string TextOf(const std::vector<CollectiveRecord>& records, int last) {
  const absl::Duration now = MonotonicNow();
  std::string text;
  const size_t skipped =
      records.size() - std::min<size_t>(records.size(), last);
  for (size_t i = skipped; i < records.size(); ++i) {
    const CollectiveRecord& r = records[i];
    const bool entered = r.entered != absl::ZeroDuration();
    const absl::Duration end = r.left == absl::ZeroDuration() ? now : r.left;
    const std::string number = entered ? absl::StrCat("#", r.sequence) : "-";
    absl::StrAppendFormat(
        &text, "%-8s %-7s queued %12s, in it %12s, since %9.3f s  ", number,
        StateOf(r), Ms((entered ? r.entered : now) - r.enqueued),
        Ms(entered ? end - r.entered : absl::ZeroDuration()),
        absl::ToDoubleSeconds(now - (entered ? r.entered : r.enqueued)));
    absl::StrAppend(&text, r.Describe(), "  ", r.Title(), "  ", r.site.file,
                    ":", r.site.line);
    if (!r.status.ok()) absl::StrAppend(&text, "  ", r.status.message());
    absl::StrAppend(&text, "\n");
  }
  return text;
}

}  // namespace

std::string CollectiveRecord::Title() const {
  return group.empty() ? what : absl::StrCat(what, " of group ", group);
}

std::string CollectiveRecord::Describe() const {
  std::string text(CollectiveName(op));
  if (*reduce != '\0') absl::StrAppend(&text, " ", reduce);
  if (root >= 0) absl::StrAppend(&text, " from rank ", root);
  if (*dtype != '\0') {
    absl::StrAppend(&text, ", ", bytes, " bytes of ", dtype);
  }
  return text;
}

FlightRecorder::FlightRecorder() {
  absl::MutexLock lock(&g_all_mutex);
  if (All().empty()) SetFatalContext(&FatalContext);
  All().push_back(this);
}

FlightRecorder::~FlightRecorder() {
  absl::MutexLock lock(&g_all_mutex);
  All().erase(std::find(All().begin(), All().end(), this));
}

int64_t FlightRecorder::Enqueue(const CollectiveRecord& record) {
  const absl::Duration now = MonotonicNow();
  absl::MutexLock lock(&mutex_);
  CollectiveRecord& slot = ring_[++tickets_ % kNumKept];
  slot = record;
  slot.ticket = tickets_;
  slot.enqueued = now;
  return tickets_;
}

CollectiveRecord* FlightRecorder::Find(int64_t ticket) {
  CollectiveRecord& slot = ring_[ticket % kNumKept];
  return slot.ticket == ticket ? &slot : nullptr;
}

void FlightRecorder::Enter(int64_t ticket, int64_t sequence) {
  const absl::Duration now = MonotonicNow();
  absl::MutexLock lock(&mutex_);
  CollectiveRecord* const record = Find(ticket);
  if (record == nullptr) return;
  record->sequence = sequence;
  record->entered = now;
}

void FlightRecorder::Leave(int64_t ticket, const absl::Status& status) {
  const absl::Duration now = MonotonicNow();
  absl::MutexLock lock(&mutex_);
  CollectiveRecord* const record = Find(ticket);
  if (record == nullptr) return;
  record->status = status;
  record->left = now;
}

std::vector<CollectiveRecord> FlightRecorder::Copy() const {
  std::vector<CollectiveRecord> records;
  const int64_t kept = std::min<int64_t>(tickets_, kNumKept);
  for (int64_t ticket = tickets_ - kept + 1; ticket <= tickets_; ++ticket) {
    records.push_back(ring_[ticket % kNumKept]);
  }
  return records;
}

std::vector<CollectiveRecord> FlightRecorder::Snapshot() const {
  absl::MutexLock lock(&mutex_);
  return Copy();
}

std::string FlightRecorder::ToText(int last) const {
  return TextOf(Snapshot(), last);
}

std::string FlightRecorder::AllToText(bool wait, int last) {
  if (wait) {
    g_all_mutex.Lock();
  } else if (!g_all_mutex.TryLock()) {
    return "";
  }
  std::string text;
  for (const FlightRecorder* recorder : All()) {
    if (wait) {
      recorder->mutex_.Lock();
    } else if (!recorder->mutex_.TryLock()) {
      continue;
    }
    const std::vector<CollectiveRecord> records = recorder->Copy();
    recorder->mutex_.Unlock();
    absl::StrAppend(&text, "the last ", std::min<size_t>(records.size(), last),
                    " collectives:\n", TextOf(records, last));
  }
  g_all_mutex.Unlock();
  return text;
}

}  // namespace tessera
