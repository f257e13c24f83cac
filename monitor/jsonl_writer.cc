#include "monitor/jsonl_writer.h"

#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/json.h"
#include "base/page/number_text.h"
#include "base/status.h"
#include "monitor/append_file.h"

namespace tessera {
namespace {

std::string HistogramText(const Histogram& histogram) {
  return absl::StrCat(
      "{\"min\": ", JsonNumberText(histogram.min),
      ", \"max\": ", JsonNumberText(histogram.max),
      ", \"sum\": ", JsonNumberText(histogram.sum),
      ", \"count\": ", histogram.count,
      ", \"not_finite\": ", histogram.not_finite, ", \"limits\": [",
      absl::StrJoin(histogram.limits, ", ",
                    [](std::string* out, double limit) {
                      absl::StrAppend(out, JsonNumberText(limit));
                    }),
      "], \"counts\": [", absl::StrJoin(histogram.counts, ", "), "]}");
}

class JsonlWriter : public MetricsWriter {
 public:
  explicit JsonlWriter(AppendFile file) : file_(std::move(file)) {}

  absl::Status Write(const StepMetrics& metrics) override {
    return file_.Append(JsonLine(metrics));
  }
  absl::Status Flush() override { return file_.Sync(); }

 private:
  AppendFile file_;
};

}  // namespace

std::string JsonLine(const StepMetrics& metrics) {
  std::string line = absl::StrCat("{\"step\": ", metrics.step,
                                  ", \"samples\": ", metrics.samples);
  absl::StrAppendFormat(&line, ", \"time\": %.6f", metrics.unix_seconds);
  for (const StepMetrics::Scalar& scalar : metrics.scalars) {
    absl::StrAppend(&line, ", ", QuoteJson(scalar.name), ": ",
                    JsonNumberText(scalar.value));
  }
  if (!metrics.texts.empty()) {
    absl::StrAppend(
        &line, ", \"texts\": {",
        absl::StrJoin(metrics.texts, ", ",
                      [](std::string* out, const StepMetrics::Text& text) {
                        absl::StrAppend(out, QuoteJson(text.tag), ": ",
                                        QuoteJson(text.text));
                      }),
        "}");
  }
  if (!metrics.histograms.empty()) {
    absl::StrAppend(
        &line, ", \"histograms\": {",
        absl::StrJoin(metrics.histograms, ", ",
                      [](std::string* out, const StepMetrics::Values& values) {
                        absl::StrAppend(out, QuoteJson(values.tag), ": ",
                                        HistogramText(values.histogram));
                      }),
        "}");
  }
  return absl::StrCat(line, "}\n");
}

absl::StatusOr<std::unique_ptr<MetricsWriter>> OpenJsonlWriter(
    const std::string& path) {
  TESSERA_RETURN_IF_ERROR(
      MakeFolders(std::filesystem::path(path).parent_path().string()));
  TESSERA_ASSIGN_OR_RETURN(AppendFile file, AppendFile::Open(path));
  if (file.has_torn_line()) TESSERA_RETURN_IF_ERROR(file.Append("\n"));
  return std::make_unique<JsonlWriter>(std::move(file));
}

}  // namespace tessera
