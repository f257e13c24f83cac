#include "base/step_memory/memory_timeline.h"

#include <cerrno>
#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/file.h"
#include "base/json.h"
#include "base/status.h"

namespace tessera {
namespace {

absl::Status Write(const std::string& path, const std::string& text) {
  FILE* const file = std::fopen(path.c_str(), "we");
  bool ok = file != nullptr;
  if (ok) ok = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  if (file != nullptr) ok = std::fclose(file) == 0 && ok;
  return ok ? absl::OkStatus() : FileError(errno, path);
}

double Microseconds(int64_t nanoseconds) {
  return static_cast<double>(nanoseconds) / 1e3;
}

void AddThread(absl::string_view name, int rank, int thread,
               std::string* json) {
  absl::StrAppendFormat(json,
                        ",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,"
                        "\"tid\":%d,\"args\":{\"name\":\"%s\"}}",
                        rank, thread, name);
}

void AddSlices(const std::vector<MemoryTimeline::Slice>& slices, int rank,
               int thread, std::string* json) {
  for (const MemoryTimeline::Slice& slice : slices) {
    absl::StrAppendFormat(
        json,
        ",\n{\"name\":%s,\"ph\":\"X\",\"ts\":%.3f,\"dur\":%.3f,"
        "\"pid\":%d,\"tid\":%d}",
        QuoteJson(slice.name), Microseconds(slice.begin),
        Microseconds(slice.end - slice.begin), rank, thread);
  }
}

void AddCounters(const MemoryTimeline::Sample& sample, int rank,
                 std::string* json) {
  const double at = Microseconds(sample.at);
  absl::StrAppendFormat(json,
                        ",\n{\"name\":\"held\",\"ph\":\"C\",\"ts\":%.3f,"
                        "\"pid\":%d,\"args\":{\"bytes\":%d}}"
                        ",\n{\"name\":\"by kind\",\"ph\":\"C\",\"ts\":%.3f,"
                        "\"pid\":%d,\"args\":{",
                        at, rank, sample.held.total(), at, rank);
  for (int i = 0; i < kNumHeldKinds; ++i) {
    const auto kind = static_cast<HeldKind>(i);
    absl::StrAppendFormat(json, "%s\"%s\":%d", i == 0 ? "" : ",",
                          HeldKindName(kind), sample.held[kind]);
  }
  absl::StrAppend(json, "}}");
}

}  // namespace

void MemoryTimeline::AddSample(const Sample& sample) {
  if (!samples.empty() && in_last_ < changes_per_sample) {
    ++in_last_;
    if (sample.held.total() > samples.back().held.total()) {
      samples.back() = sample;
    }
    return;
  }
  if (samples.size() == kMaxSamples) {
    for (size_t i = 0; i < kMaxSamples / 2; ++i) {
      const Sample& first = samples[2 * i];
      const Sample& second = samples[2 * i + 1];
      samples[i] = first.held.total() >= second.held.total() ? first : second;
    }
    samples.resize(kMaxSamples / 2);
    changes_per_sample *= 2;
  }
  samples.push_back(sample);
  in_last_ = 1;
}

void MemoryTimeline::AddUnit(Slice slice) {
  if (units.size() == kMaxSlices) {
    ++slices_left_out;
  } else {
    units.push_back(std::move(slice));
  }
}

std::string ToChromeTrace(const MemoryTimeline& timeline, int rank) {
  std::string json = absl::StrFormat(
      "{\"traceEvents\":[\n{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%d,"
      "\"tid\":0,\"args\":{\"name\":\"rank %d\"}}",
      rank, rank);
  AddThread("phases", rank, 1, &json);
  AddThread("units", rank, 2, &json);
  AddSlices(timeline.phases, rank, 1, &json);
  AddSlices(timeline.units, rank, 2, &json);
  for (const auto& sample : timeline.samples) AddCounters(sample, rank, &json);
  absl::StrAppendFormat(
      &json,
      "\n],\n\"otherData\":{\"peak_bytes\":%d,\"changes_per_sample\":%d,",
      timeline.report.peak_bytes, timeline.changes_per_sample);
  absl::StrAppendFormat(&json,
                        "\"unit_slices_left_out\":%d,\n\"activations\":[",
                        timeline.slices_left_out);
  const char* separator = "";
  for (const UnitActivations& unit : timeline.report.activations) {
    absl::StrAppend(&json, separator, "{\"unit\":", QuoteJson(unit.unit),
                    ",\"bytes\":", unit.bytes, "}");
    separator = ",\n";
  }
  absl::StrAppend(&json, "]}}\n");
  return json;
}

absl::Status WriteTimeline(const MemoryTimeline& timeline,
                           absl::string_view prefix, int rank) {
  TESSERA_RETURN_IF_ERROR(Write(absl::StrCat(prefix, rank, ".json"),
                                ToChromeTrace(timeline, rank)));
  return Write(absl::StrCat(prefix, rank, ".html"), ToPage(timeline, rank));
}

}  // namespace tessera
