#include "engine/observe/metrics_outputs.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "config/config.pb.h"
#include "monitor/append_file.h"
#include "monitor/csv_writer.h"
#include "monitor/event_writer.h"
#include "monitor/jsonl_writer.h"

namespace tessera {

bool MetricsOutputs::Wanted(const proto::Config& config) {
  return config.tensorboard().enabled() || config.csv_monitor().enabled() ||
         config.jsonl_monitor().enabled();
}

std::string RunFolder(const proto::Config& config) {
  return JoinPath(config.jsonl_monitor().output_path(),
                  config.jsonl_monitor().job_name());
}

absl::StatusOr<MetricsOutputs> MetricsOutputs::Open(
    const proto::Config& config,
    const std::vector<std::shared_ptr<MetricsWriter>>& own) {
  std::vector<std::shared_ptr<MetricsWriter>> writers = own;
  if (std::count(own.begin(), own.end(), nullptr) > 0) {
    return absl::InvalidArgumentError(
        "EngineOptions::metrics_writers: expected writers, got a null pointer");
  }
  const auto add = [&](absl::string_view section, auto writer) -> absl::Status {
    if (!writer.ok()) {
      return Annotate(writer.status(), absl::StrCat(section, ".output_path"));
    }
    writers.push_back(*std::move(writer));
    return absl::OkStatus();
  };
  if (config.jsonl_monitor().enabled()) {
    TESSERA_RETURN_IF_ERROR(
        add("jsonl_monitor",
            OpenJsonlWriter(JoinPath(RunFolder(config), "metrics.jsonl"))));
  }
  if (config.csv_monitor().enabled()) {
    const proto::TensorBoard& csv = config.csv_monitor();
    TESSERA_RETURN_IF_ERROR(
        add("csv_monitor",
            OpenCsvWriter(JoinPath(csv.output_path(), csv.job_name()))));
  }
  if (config.tensorboard().enabled()) {
    const proto::TensorBoard& events = config.tensorboard();
    TESSERA_RETURN_IF_ERROR(add(
        "tensorboard",
        OpenEventWriter(JoinPath(events.output_path(), events.job_name()))));
  }
  return MetricsOutputs(std::move(writers));
}

MetricsOutputs::MetricsOutputs(
    std::vector<std::shared_ptr<MetricsWriter>> writers) {
  for (auto& writer : writers) writers_.push_back({std::move(writer)});
}

void MetricsOutputs::Warn(const absl::Status& status, Writer* of) {
  if (status.ok() || of->warned) return;
  of->warned = true;
  TESSERA_LOG(WARNING) << "metrics: " << status.message()
                       << "; training continues, and each step tries to write "
                          "again (logged once)";
}

void MetricsOutputs::Write(const StepMetrics& metrics) {
  for (Writer& each : writers_) {
    Warn(CatchTorch("Write", [&] { return each.writer->Write(metrics); }),
         &each);
  }
}

void MetricsOutputs::Flush() {
  for (Writer& each : writers_) {
    Warn(CatchTorch("Flush", [&] { return each.writer->Flush(); }), &each);
  }
}

}  // namespace tessera
