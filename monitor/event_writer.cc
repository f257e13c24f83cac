#include "monitor/event_writer.h"

#include <unistd.h>

#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "monitor/append_file.h"
#include "monitor/event.pb.h"
#include "monitor/record_framing.h"

namespace tessera {
namespace {

constexpr int kString = 7;  // DT_STRING

void SetHistogram(const Histogram& from, tensorboard::HistogramProto* to) {
  to->set_min(from.min);
  to->set_max(from.max);
  to->set_num(static_cast<double>(from.count));
  to->set_sum(from.sum);
  to->set_sum_squares(from.sum_squares);
  for (const double limit : from.limits) to->add_bucket_limit(limit);
  for (const int64_t count : from.counts) {
    to->add_bucket(static_cast<double>(count));
  }
}

// Writes text as torch.utils.tensorboard's add_text does.
void SetText(const StepMetrics::Text& text, tensorboard::SummaryValue* value) {
  value->set_tag(absl::StrCat(text.tag, "/text_summary"));
  value->mutable_metadata()->mutable_plugin_data()->set_plugin_name("text");
  tensorboard::TensorProto& tensor = *value->mutable_tensor();
  tensor.set_dtype(kString);
  tensor.mutable_tensor_shape()->add_dim()->set_size(1);
  tensor.add_string_val(text.text);
}

tensorboard::Event EventOf(const StepMetrics& metrics) {
  tensorboard::Event event;
  event.set_wall_time(metrics.unix_seconds);
  event.set_step(metrics.samples);
  tensorboard::Summary& summary = *event.mutable_summary();
  for (const StepMetrics::Scalar& scalar : metrics.scalars) {
    tensorboard::SummaryValue& value = *summary.add_value();
    value.set_tag(scalar.tag);
    value.set_simple_value(static_cast<float>(scalar.value));
  }
  for (const StepMetrics::Values& values : metrics.histograms) {
    tensorboard::SummaryValue& value = *summary.add_value();
    value.set_tag(values.tag);
    SetHistogram(values.histogram, value.mutable_histo());
  }
  for (const StepMetrics::Text& text : metrics.texts) {
    SetText(text, summary.add_value());
  }
  return event;
}

class EventWriter : public MetricsWriter {
 public:
  explicit EventWriter(AppendFile file) : file_(std::move(file)) {}

  absl::Status Write(const StepMetrics& metrics) override {
    return Append(EventOf(metrics));
  }
  absl::Status Append(const tensorboard::Event& event) {
    return file_.Append(Framed(event.SerializeAsString()));
  }
  absl::Status Flush() override { return file_.Sync(); }

 private:
  AppendFile file_;
};

std::string NewFileName(absl::Time now) {
  static std::atomic<int> writers{0};
  char host[256] = {};
  if (::gethostname(host, sizeof(host) - 1) != 0) host[0] = '\0';
  return absl::StrFormat(
      "events.out.tfevents.%010d.%s.%d.%d", absl::ToUnixSeconds(now),
      host[0] == '\0' ? "localhost" : host, ::getpid(), writers++);
}

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsWriter>> OpenEventWriter(
    const std::string& folder) {
  TESSERA_RETURN_IF_ERROR(MakeFolders(folder));
  const absl::Time now = absl::Now();
  TESSERA_ASSIGN_OR_RETURN(
      AppendFile file, AppendFile::Open(JoinPath(folder, NewFileName(now))));
  auto writer = std::make_unique<EventWriter>(std::move(file));
  tensorboard::Event first;
  first.set_wall_time(absl::ToDoubleSeconds(now - absl::UnixEpoch()));
  first.set_file_version("brain.Event:2");
  TESSERA_RETURN_IF_ERROR(writer->Append(first));
  return writer;
}

}  // namespace tessera
