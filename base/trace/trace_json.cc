#include "base/trace/trace_json.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <system_error>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/file.h"
#include "base/json.h"
#include "base/status.h"

namespace tessera {
namespace {

// A track's threads are numbered from here; memory_timeline's are lower.
constexpr int kFirstThread = 100;
constexpr int kLanes = 100;

// The rows of one track. A viewer needs spans of a row to be nested or
// disjoint.
class Lanes {
 public:
  // Call it in the order of begins, for equal ones the longest first.
  int LaneOf(const TraceSpan& span) {
    for (size_t lane = 0; lane < open_.size(); ++lane) {
      std::vector<int64_t>& ends = open_[lane];
      while (!ends.empty() && ends.back() <= span.begin) ends.pop_back();
      if (!ends.empty() && ends.back() < span.end) continue;
      ends.push_back(span.end);
      return static_cast<int>(lane);
    }
    if (open_.size() == kLanes) return kLanes - 1;
    open_.push_back({span.end});
    return static_cast<int>(open_.size()) - 1;
  }
  int count() const { return static_cast<int>(open_.size()); }

 private:
  std::vector<std::vector<int64_t>> open_;  // ends of the spans that go on
};

void AddSpan(const TraceSpan& span, int rank, int thread, std::string* json) {
  absl::StrAppendFormat(
      json,
      ",\n{\"name\":%s,\"ph\":\"X\",\"ts\":%.3f,\"dur\":%.3f,\"pid\":%d,"
      "\"tid\":%d,\"cat\":\"%s\",\"args\":{",
      QuoteJson(span.name), static_cast<double>(span.begin) / 1e3,
      static_cast<double>(span.end - span.begin) / 1e3, rank, thread,
      TraceTrackName(span.track));
  const char* separator = "";
  if (!span.unit.empty()) {
    absl::StrAppend(json, "\"unit\":", QuoteJson(span.unit));
    separator = ",";
  }
  if (span.bytes >= 0) {
    absl::StrAppend(json, separator, "\"bytes\":", span.bytes);
    separator = ",";
  }
  if (!span.args.empty()) absl::StrAppend(json, separator, span.args);
  absl::StrAppend(json, "}}");
}

void AddThreadName(TraceTrack track, int lane, int rank, std::string* json) {
  const int thread = kFirstThread + static_cast<int>(track) * kLanes + lane;
  std::string name(TraceTrackName(track));
  if (lane > 0) absl::StrAppend(&name, " ", lane + 1);
  absl::StrAppendFormat(json,
                        ",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,"
                        "\"tid\":%d,\"args\":{\"name\":\"%s\"}}"
                        ",\n{\"name\":\"thread_sort_index\",\"ph\":\"M\","
                        "\"pid\":%d,\"tid\":%d,\"args\":{\"sort_index\":%d}}",
                        rank, thread, name, rank, thread, thread);
}

}  // namespace

std::string TraceToJson(const TraceRecording& recording,
                        const TraceProcess& process) {
  const int rank = process.rank;
  std::string json = absl::StrFormat(
      "{\"traceEvents\":[\n{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%d,"
      "\"tid\":0,\"args\":{\"name\":\"rank %d\"}}"
      ",\n{\"name\":\"process_sort_index\",\"ph\":\"M\",\"pid\":%d,\"tid\":0,"
      "\"args\":{\"sort_index\":%d}}",
      rank, rank, rank, rank);
  std::vector<const TraceSpan*> spans;
  for (const TraceSpan& span : recording.spans) spans.push_back(&span);
  std::stable_sort(
      spans.begin(), spans.end(), [](const TraceSpan* a, const TraceSpan* b) {
        return a->begin != b->begin ? a->begin < b->begin : a->end > b->end;
      });
  std::array<Lanes, kNumTraceTracks> lanes;
  for (const TraceSpan* span : spans) {
    const auto track = static_cast<size_t>(span->track);
    AddSpan(*span, rank,
            kFirstThread + static_cast<int>(track) * kLanes +
                lanes[track].LaneOf(*span),
            &json);
  }
  for (int track = 0; track < kNumTraceTracks; ++track) {
    for (int i = 0; i < lanes[static_cast<size_t>(track)].count(); ++i) {
      AddThreadName(static_cast<TraceTrack>(track), i, rank, &json);
    }
  }
  absl::StrAppendFormat(
      &json,
      "\n],\n\"displayTimeUnit\":\"ms\",\n\"otherData\":{\"tessera\":1,"
      "\"rank\":%d,\"world_size\":%d,\"host\":%s,\"spans_left_out\":%d}}\n",
      rank, process.world_size, QuoteJson(process.host), recording.left_out);
  return json;
}

absl::Status WriteFileAtomically(const std::string& path,
                                 absl::string_view text) {
  const std::filesystem::path parent =
      std::filesystem::path(path).parent_path();
  std::error_code error;
  const auto there = std::filesystem::status(path, error);
  if (std::filesystem::exists(there) &&
      !std::filesystem::is_regular_file(there)) {  // /dev/null stays what it is
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": exists and is not a file"));
  }
  if (!parent.empty()) {
    error.clear();
    std::filesystem::create_directories(parent, error);
    if (error) return FileError(error.value(), parent.string());
  }
  // The temporary file is in the same folder, since a rename works only within
  // a file system.
  std::string made = absl::StrCat(path, ".XXXXXX");
  const int fd = mkostemp(made.data(), O_CLOEXEC);
  if (fd < 0) return FileError(errno, path);
  auto remove = absl::MakeCleanup([&] { unlink(made.c_str()); });
  absl::Status status =
      WriteAt(fd, path, 0, text.data(), static_cast<int64_t>(text.size()));
  if (status.ok() && fchmod(fd, 0644) != 0) status = FileError(errno, path);
  if (close(fd) != 0 && status.ok()) status = FileError(errno, path);
  TESSERA_RETURN_IF_ERROR(status);
  if (std::rename(made.c_str(), path.c_str()) != 0) {
    return FileError(errno, path);
  }
  std::move(remove).Cancel();
  return absl::OkStatus();
}

}  // namespace tessera
