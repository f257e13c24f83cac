#include "report/trace_file.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status.h"

namespace tessera {
namespace {

constexpr int64_t kMaxTraceBytes = int64_t{1} << 30;

SpanRecord EventOf(const JsonValue& json) {
  SpanRecord event;
  event.track = json.TextAt("cat");
  event.name = json.TextAt("name");
  event.begin = json.NumberAt("ts", 0);
  event.end = event.begin + json.NumberAt("dur", 0);
  const JsonValue* const args = json.Find("args");
  if (args == nullptr || args->kind != JsonKind::kObject) return event;
  event.unit = args->TextAt("unit");
  if (args->Find("bytes") != nullptr) {
    event.bytes = static_cast<int64_t>(args->NumberAt("bytes", 0));
  }
  event.wait = args->TextAt("wait");
  event.op = args->TextAt("op");
  event.group = args->TextAt("group");
  event.sequence = static_cast<int64_t>(args->NumberAt("sequence", 0));
  event.queued = args->NumberAt("queued_us", 0);
  const JsonValue* const ahead = args->Find("ahead");
  event.ahead = ahead != nullptr && ahead->boolean;
  event.step = static_cast<int64_t>(args->NumberAt("step", 0));
  // Older traces number steps in this way.
  event.update = args->Find("update") == nullptr
                     ? event.step
                     : static_cast<int64_t>(args->NumberAt("update", 0));
  return event;
}

// Returns its events, or an error that names the file.
absl::StatusOr<const JsonValue*> EventsOf(const JsonValue& json,
                                          const std::string& path) {
  const JsonValue* const events =
      json.kind == JsonKind::kObject ? json.Find("traceEvents") : nullptr;
  if (events != nullptr && events->kind == JsonKind::kArray) return events;
  return absl::InvalidArgumentError(absl::StrCat(
      path, ": expected a trace, a JSON object with an array traceEvents"));
}

}  // namespace

absl::StatusOr<JsonValue> ReadLargeJson(const std::string& path) {
  TESSERA_ASSIGN_OR_RETURN(const std::string text,
                           ReadRegularFile(path, kMaxTraceBytes));
  JsonLimits limits;
  limits.max_bytes = kMaxTraceBytes;
  limits.max_values = int64_t{1} << 28;
  return ReadJson(text, path, limits);
}

absl::StatusOr<TraceFile> ReadTraceFile(const std::string& path) {
  TESSERA_ASSIGN_OR_RETURN(const JsonValue json, ReadLargeJson(path));
  TESSERA_ASSIGN_OR_RETURN(const JsonValue* const events, EventsOf(json, path));
  const JsonValue* const other = json.Find("otherData");
  if (other == nullptr || other->kind != JsonKind::kObject ||
      other->Find("tessera") == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(path,
                     ": is no trace of the configuration's `trace` section "
                     "(trace.rank0.json)"));
  }
  TraceFile file;
  file.path = path;
  file.rank = static_cast<int>(other->NumberAt("rank", 0));
  file.world_size = static_cast<int>(other->NumberAt("world_size", 0));
  file.host = other->TextAt("host");
  file.left_out = static_cast<int64_t>(other->NumberAt("spans_left_out", 0));
  for (const JsonValue& event : events->elements) {
    if (event.kind != JsonKind::kObject || event.TextAt("ph") != "X") continue;
    file.events.push_back(EventOf(event));
  }
  std::stable_sort(file.events.begin(), file.events.end(),
                   [](const SpanRecord& a, const SpanRecord& b) {
                     return a.begin < b.begin;
                   });
  return file;
}

absl::StatusOr<std::string> MergeTraces(const std::vector<std::string>& paths) {
  std::string merged = "{\"traceEvents\":[";
  const char* separator = "\n";
  for (const std::string& path : paths) {
    TESSERA_ASSIGN_OR_RETURN(const JsonValue json, ReadLargeJson(path));
    TESSERA_ASSIGN_OR_RETURN(const JsonValue* const events,
                             EventsOf(json, path));
    for (const JsonValue& event : events->elements) {
      absl::StrAppend(&merged, separator, ToJsonText(event));
      separator = ",\n";
    }
  }
  absl::StrAppend(&merged, "\n],\n\"displayTimeUnit\":\"ms\"}\n");
  return merged;
}

}  // namespace tessera
