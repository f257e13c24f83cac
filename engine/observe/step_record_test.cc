// What a step's record becomes, without an engine: ranks, names, lines, times.
#include "engine/observe/step_record.h"

#include <cmath>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "engine/observe/device_peak.h"
#include "engine/observe/metrics_outputs.h"
#include "engine/observe/print_lines.h"
#include "engine/observe/step_clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

RankMetrics Rank(double loss_sum, double weight, double step, double forward) {
  RankMetrics rank;
  rank.loss_sum = loss_sum;
  rank.loss_weight = weight;
  rank.times.step = step;
  rank.times.forward = forward;
  rank.tokens = 10;
  return rank;
}

// The value of that name; NaN if it is not there.
double Of(const StepMetrics& metrics, const std::string& name) {
  for (const StepMetrics::Scalar& scalar : metrics.scalars) {
    if (scalar.name == name) return scalar.value;
  }
  return std::nan("");
}

TEST(RankMetricsTest, ComeBackFromTheirValues) {
  RankMetrics sent = Rank(1, 2, 3, 4);
  sent.times.backward = 5;
  sent.times.autograd = 6;
  sent.times.update = 7;
  sent.peak_bytes = 8;
  sent.at_peak.by_kind.back() = 9;
  std::vector<double> values(static_cast<size_t>(RankMetrics::numel()));
  sent.ToValues(absl::MakeSpan(values));
  const RankMetrics got = RankMetrics::FromValues(values);
  EXPECT_EQ(got.loss_sum, 1);
  EXPECT_EQ(got.loss_weight, 2);
  EXPECT_EQ(got.times.step, 3);
  EXPECT_EQ(got.times.forward, 4);
  EXPECT_EQ(got.times.backward, 5);
  EXPECT_EQ(got.times.autograd, 6);
  EXPECT_EQ(got.times.update, 7);
  EXPECT_EQ(got.tokens, 10);
  EXPECT_EQ(got.peak_bytes, 8);
  EXPECT_EQ(got.at_peak.by_kind, sent.at_peak.by_kind);
  EXPECT_TRUE(std::isnan(got.data_wait));
}

TEST(StepRecordTest, RanksTogether) {
  StepRecord record;
  AddRanks({Rank(3, 1, 1.0, 0.5), Rank(0, 0, 1.5, 0.2), Rank(9, 2, 1.2, 0.7)},
           &record);
  EXPECT_EQ(record.loss, 4);  // the second had no data
  EXPECT_EQ(record.tokens, 30);
  EXPECT_EQ(record.times.step, 1.5);
  EXPECT_EQ(record.step_times.slowest, 1);
  EXPECT_EQ(record.step_times.fastest, 0);
  EXPECT_EQ(record.forward_times.slowest, 2);
  EXPECT_EQ(record.forward_times.fastest, 1);
  record.groups = {{"default", 0.5}, {"heads", 0.25}};
  const StepMetrics metrics = MetricsOf(record);
  EXPECT_EQ(Of(metrics, "loss"), 4);
  EXPECT_EQ(Of(metrics, "lr"), 0.5);
  EXPECT_EQ(Of(metrics, "lr/heads"), 0.25);
  EXPECT_EQ(Of(metrics, "step_ms"), 1500);
  EXPECT_EQ(Of(metrics, "forward_slowest_rank"), 2);
  for (const char* unknown : {"grad_norm", "loss_scale", "mfu", "tflops",
                              "data_wait_ms", "exposed_comm_ms"}) {
    EXPECT_TRUE(std::isnan(Of(metrics, unknown))) << unknown;
  }
}

TEST(StepRecordTest, OneRankHasNoStragglers) {
  StepRecord record;
  AddRanks({Rank(3, 1, 1, 1)}, &record);
  EXPECT_TRUE(std::isnan(Of(MetricsOf(record), "step_slowest_rank")));
}

TEST(PrintLinesTest, SayWhatIsKnown) {
  StepRecord record;
  record.step = 20;
  record.loss = 2.5;
  record.groups = {{"default", 0.001}};
  PrintInterval interval;
  StepTimes times;
  times.step = 0.5;
  times.forward = 0.125;
  times.backward = 0.25;
  times.autograd = 0.1875;
  times.update = 0.0625;
  interval.Add(times, 64);
  interval.Add(times, 64);
  EXPECT_EQ(ProgressLine(record, interval, /*speed=*/false),
            "step=20, skipped=0, lr=[0.001], loss=2.5");
  record.grad_norm = 0.25;
  record.tflops = 1.5;
  interval.tokens = 1000;
  EXPECT_EQ(ProgressLine(record, interval, /*speed=*/true),
            "step=20, skipped=0, lr=[0.001], loss=2.5, grad_norm=0.25, 500.0 "
            "ms a step, 128.0 samples/s, 1000 tokens/s, 1.5 TFLOP/s a rank, "
            "peak 0 B");
  EXPECT_EQ(BreakdownLine(interval),
            "time (ms) | step: 500.00 | fwd: 125.00 | bwd: 250.00 | bwd_inner: "
            "187.50 | bwd_allreduce: 62.50 | update: 62.50 | other: 62.50");
}

TEST(StepClockTest, DividesAStep) {
  absl::Duration now = absl::Seconds(100);
  StepClock clock([&now] { return now; });
  const auto pass = [&now](int seconds) { now += absl::Seconds(seconds); };
  for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
    pass(4);
    EXPECT_EQ(clock.EndForward(), 4);
    pass(5);
    clock.EndAutograd();
    pass(2);
    clock.EndBackward();
    pass(1);  // the program's own
    clock.BeginStep();
    pass(3);
    if (micro_batch == 0) clock.EndMicroBatch();
  }
  const StepTimes times = clock.EndStep();
  EXPECT_EQ(times.step, 30);
  EXPECT_EQ(times.forward, 8);
  EXPECT_EQ(times.autograd, 10);
  EXPECT_EQ(times.backward, 14);
  EXPECT_EQ(times.update, 6);
  pass(7);
  EXPECT_EQ(clock.EndForward(), 7);
  EXPECT_EQ(clock.EndStep().step, 7);
}

TEST(DevicePeakTest, ByWhatTheDriverCallsIt) {
  EXPECT_EQ(PeakFlopsOf("NVIDIA H100 80GB HBM3"), 989e12);
  EXPECT_EQ(PeakFlopsOf("NVIDIA H100 PCIe"), 756e12);
  EXPECT_EQ(PeakFlopsOf("NVIDIA A100-SXM4-40GB"), 312e12);
  EXPECT_EQ(PeakFlopsOf("NVIDIA L40S"), 362e12);
  EXPECT_EQ(PeakFlopsOf("NVIDIA L4"), 121e12);
  EXPECT_EQ(PeakFlopsOf("GeForce 256"), 0);
  EXPECT_EQ(PeakFlopsOf("NVIDIA RTX A1000"), 0);  // no A100
  EXPECT_EQ(PeakFlopsOf("NVIDIA GB200"), 0);      // no B200
  EXPECT_EQ(PeakFlopsOf("NVIDIA A100-SXM4-80GB"), 312e12);
  EXPECT_EQ(PeakFlopsOf(""), 0);
}

// ---- a writer that fails

class FailingWriter : public MetricsWriter {
 public:
  explicit FailingWriter(int* calls) : calls_(calls) {}
  absl::Status Write(const StepMetrics&) override {
    ++*calls_;
    return absl::ResourceExhaustedError("path: No space left on device");
  }
  absl::Status Flush() override { return absl::OkStatus(); }

 private:
  int* const calls_;
  const std::string path_ = "path";
};

TEST(MetricsOutputsTest, AWriterThatFailsWarnsOnceAndIsTriedAgain) {
  int first = 0, second = 0;
  std::vector<std::shared_ptr<MetricsWriter>> writers;
  writers.push_back(std::make_unique<FailingWriter>(&first));
  writers.push_back(std::make_unique<FailingWriter>(&second));
  MetricsOutputs outputs(std::move(writers));
  ::testing::internal::CaptureStderr();
  outputs.Write({});
  outputs.Write({});
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(first, 2);
  EXPECT_EQ(second, 2);  // whatever became of the first
  size_t warnings = 0;
  for (size_t at = log.find("metrics: "); at != std::string::npos;
       at = log.find("metrics: ", at + 1)) {
    ++warnings;
  }
  EXPECT_EQ(warnings, 2);
  EXPECT_THAT(log,
              HasSubstr("path: No space left on device; training continues"));
}

}  // namespace
}  // namespace tessera
