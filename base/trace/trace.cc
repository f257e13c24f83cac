#include "base/trace/trace.h"

#include "absl/base/const_init.h"
#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace tessera {

namespace trace_internal {
std::atomic<bool> g_records{false};
}  // namespace trace_internal

namespace {

using trace_internal::g_records;

ABSL_CONST_INIT absl::Mutex g_mutex(absl::kConstInit);

// Never destroyed: threads may outlive main.
TraceRecording& Recording() ABSL_EXCLUSIVE_LOCKS_REQUIRED(g_mutex) {
  static TraceRecording* const recording = new TraceRecording;
  return *recording;
}

}  // namespace

absl::string_view TraceTrackName(TraceTrack track) {
  switch (track) {
    case TraceTrack::kSteps:
      return "steps";
    case TraceTrack::kMain:
      return "main";
    case TraceTrack::kUnits:
      return "units";
    case TraceTrack::kGather:
      return "gather";
    case TraceTrack::kCommunication:
      return "communication";
    case TraceTrack::kPulls:
      return "pulls";
    case TraceTrack::kReduce:
      return "reduce";
    case TraceTrack::kFree:
      return "free";
    case TraceTrack::kStep:
      return "step";
    case TraceTrack::kHostUpdate:
      return "host update";
    case TraceTrack::kDiskRead:
      return "disk read";
    case TraceTrack::kDiskWrite:
      return "disk write";
    case TraceTrack::kCheckpoint:
      return "checkpoint";
  }
  return "";
}

void AddTraceSpan(TraceSpan span) {
  if (!TraceRecords()) return;
  absl::MutexLock lock(&g_mutex);
  // The recording may have ended since; what began before it is cut off there.
  if (!g_records.load(std::memory_order_relaxed)) return;
  TraceRecording& recording = Recording();
  if (span.end < recording.begin) return;
  if (span.begin < recording.begin) span.begin = recording.begin;
  if (recording.spans.size() == TraceRecording::kMaxSpans) {
    ++recording.left_out;
    return;
  }
  recording.spans.push_back(std::move(span));
}

absl::string_view UnitInText(absl::string_view text) {
  constexpr absl::string_view kOf = " of unit ";
  const size_t at = text.find(kOf);
  if (at == absl::string_view::npos) return {};
  absl::string_view unit = text.substr(at + kOf.size());
  // The text is "..., over replicas" or "... of group nodes 1.0".
  unit = unit.substr(0, unit.find(", over "));
  return unit.substr(0, unit.find(" of group "));
}

void TraceScope::Begin(TraceTrack track, absl::string_view name,
                       absl::string_view unit, int64_t bytes) {
  track_ = track;
  name_ = name;
  unit_ = unit;
  bytes_ = bytes;
  begin_ = TraceNow();
}

void TraceScope::End() {
  AddTraceSpan({track_, std::string(name_), begin_, TraceNow(),
                std::string(unit_), bytes_, ""});
}

bool StartTrace() {
  absl::MutexLock lock(&g_mutex);
  if (g_records.load(std::memory_order_relaxed)) return false;
  Recording() = TraceRecording();
  Recording().begin = TraceNow();
  g_records = true;
  return true;
}

TraceRecording StopTrace() {
  absl::MutexLock lock(&g_mutex);
  if (!g_records.load(std::memory_order_relaxed)) return {};
  g_records = false;
  Recording().end = TraceNow();
  return std::exchange(Recording(), TraceRecording());
}

}  // namespace tessera
