#include "base/step_memory/device_memory.h"

#include <algorithm>
#include <utility>

#include "base/step_memory/step_memory.h"

namespace tessera {

DeviceMemory::DeviceMemory(const MemoryLedger* ledger,
                           std::function<int64_t()> allocated_bytes)
    : ledger_(ledger), allocated_bytes_(std::move(allocated_bytes)) {
  StepMemory::Global().AddDevice(this);
}

DeviceMemory::~DeviceMemory() { StepMemory::Global().RemoveDevice(this); }

HeldMemory DeviceMemory::HeldOn(const MemoryLedger& ledger,
                                int64_t allocated_bytes) {
  HeldMemory held;
  const MemoryReport report = ledger.Report();
  int64_t counted = 0;
  for (size_t i = 0; i < kNumMemoryKinds; ++i) {
    held.by_kind[i] = report.by_kind[i].current_bytes;
    counted += held.by_kind[i];
  }
  held.by_kind[static_cast<size_t>(HeldKind::kTensors)] =
      std::max<int64_t>(0, allocated_bytes - counted);
  return held;
}

HeldMemory DeviceMemory::Now() const {
  return HeldOn(*ledger_, allocated_bytes_());
}

void DeviceMemory::Look(MemoryPhase phase, int unit) {
  const HeldMemory held = Now();
  absl::MutexLock lock(&mutex_);
  if (held.total() > peak_.held.total()) peak_ = {held, phase, unit};
}

DeviceMemory::Moment DeviceMemory::peak() const {
  absl::MutexLock lock(&mutex_);
  return peak_;
}

DeviceMemory::Moment DeviceMemory::TakePeak() {
  absl::MutexLock lock(&mutex_);
  return std::exchange(peak_, Moment{});
}

}  // namespace tessera
