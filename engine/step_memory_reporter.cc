#include "engine/step_memory_reporter.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/log.h"
#include "c10/core/CachingDeviceAllocator.h"

namespace tessera {
namespace {

constexpr int64_t kPrintedSteps = 3;
constexpr size_t kPrintedUnits = 10;

// Since the last call.
int64_t TakeDevicePeak(const at::Device& device) {
  if (device.is_cpu()) return 0;
  auto* const allocator = c10::getDeviceAllocator(device.type());
  const auto stats = allocator->getDeviceStats(device.index());
  allocator->resetPeakStats(device.index());
  return stats
      .allocated_bytes[static_cast<size_t>(
          c10::CachingAllocator::StatType::AGGREGATE)]
      .peak;
}

}  // namespace

bool StepMemoryReporter::IsRecorded(int64_t step) const {
  const proto::MemoryTimeline& config = parts_->config.memory_timeline();
  return !config.path().empty() && config.step() == step;
}

void StepMemoryReporter::Begin() {
  training_.emplace();
  (void)TakeDevicePeak(parts_->device());
  if (IsRecorded(1)) RecordMemory();
}

StepMemoryReport StepMemoryReporter::EndStep() {
  StepMemory& memory = StepMemory::Global();
  StepMemoryReport report = memory.EndStep();
  report.device_peak_bytes = TakeDevicePeak(parts_->device());
  ++steps_;
  if (auto timeline = memory.TakeTimeline()) {
    timeline->report = report;
    timeline_ = *std::move(timeline);
  }
  if (IsRecorded(steps_)) {
    const absl::Status written =
        WriteMemoryTimeline(parts_->config.memory_timeline().path());
    if (!written.ok()) TESSERA_LOG(WARNING) << "memory_timeline: " << written;
  }
  if (IsRecorded(steps_ + 1)) RecordMemory();
  if (parts_->config.memory_breakdown() && steps_ <= kPrintedSteps &&
      parts_->comm->rank() == 0) {
    const std::string table = StepMemoryTable(report, kPrintedUnits);
    for (absl::string_view line : absl::StrSplit(table, '\n')) {
      TESSERA_LOG(INFO) << "memory of step " << steps_ << ": " << line;
    }
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
  return WriteTimeline(*timeline_, prefix, parts_->comm->rank());
}

}  // namespace tessera
