#include "engine/train/step_memory_reporter.h"

#include <utility>

#include "base/log.h"
#include "base/torch/device_ledger.h"
#include "c10/core/CachingDeviceAllocator.h"
#include "config/config.pb.h"

namespace tessera {
namespace {

constexpr int64_t kPrintedSteps = 3;
constexpr size_t kPrintedUnits = 10;

constexpr auto kAll =
    static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

// REQUIRES: no CPU. The peaks are those since ResetPeaks.
c10::CachingDeviceAllocator::DeviceStats StatsOf(const at::Device& device) {
  return c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
}

void ResetPeaks(const at::Device& device) {
  c10::getDeviceAllocator(device.type())->resetPeakStats(device.index());
}

}  // namespace

bool StepMemoryReporter::IsRecorded(int64_t step) const {
  const proto::MemoryTimeline& config = config_.memory_timeline();
  return !config.path().empty() && config.step() == step;
}

void StepMemoryReporter::Begin() {
  training_.emplace();
  const at::Device device = model_.device();
  if (!device.is_cpu()) {
    device_.emplace(&LedgerOf(device), [device] {
      return StatsOf(device).allocated_bytes[kAll].current;
    });
    ResetPeaks(device);
  }
  if (IsRecorded(1)) RecordMemory();
}

// Peaks are since the step before ended, or Begin.
StepMemoryReport StepMemoryReporter::ReportOfDevice(StepMemoryReport report) {
  const at::Device device = model_.device();
  const auto stats = StatsOf(device);
  ResetPeaks(device);
  report.device = device.str();
  report.peak_bytes = stats.allocated_bytes[kAll].peak;
  report.reserved_peak_bytes = stats.reserved_bytes[kAll].peak;
  report.at_peak = StepMemory::Global().TakePeakOf(&*device_);
  report.activations.clear();
  return report;
}

StepMemoryReport StepMemoryReporter::EndStep() {
  StepMemory& memory = StepMemory::Global();
  StepMemoryReport report = memory.EndStep();
  if (device_.has_value()) report = ReportOfDevice(std::move(report));
  ++steps_;
  if (auto timeline = memory.TakeTimeline()) {
    timeline->report = report;
    timeline->step = steps_;
    timeline_ = *std::move(timeline);
  }
  if (IsRecorded(steps_)) {
    const absl::Status written =
        WriteMemoryTimeline(config_.memory_timeline().path());
    if (!written.ok()) TESSERA_LOG(WARNING) << "memory_timeline: " << written;
  }
  if (IsRecorded(steps_ + 1)) RecordMemory();
  if (config_.memory_breakdown() && steps_ <= kPrintedSteps &&
      model_.comm()->rank() == 0) {
    TESSERA_LOG(INFO) << "memory of step " << steps_ << ": "
                      << StepMemoryTable(report, kPrintedUnits);
  }
  return report;
}

absl::Status StepMemoryReporter::WriteMemoryTimeline(
    const std::string& prefix) {
  if (!timeline_.has_value()) {
    return absl::FailedPreconditionError(
        "WriteMemoryTimeline: no step was recorded; call RecordMemory before "
        "its forward, and this after its Step");
  }
  return WriteTimeline(*timeline_, prefix, model_.comm()->rank());
}

}  // namespace tessera
