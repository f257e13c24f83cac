// What benchmarks/train.cc measures, as JSON.
#ifndef BENCHMARKS_TRAIN_FIGURES_H_
#define BENCHMARKS_TRAIN_FIGURES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/step_memory/held_memory.h"
#include "c10/core/CachingDeviceAllocator.h"

namespace tessera {

struct Figures {
  std::vector<double> milliseconds;  // of the timed steps
  std::vector<double> losses;
};

// "1.5, 2.25": a loss comes back from it as the same bits. Python reads what is
// not finite, too.
inline std::string Listed(const std::vector<double>& values) {
  return absl::StrJoin(values, ", ", [](std::string* out, double value) {
    if (std::isfinite(value)) {
      absl::StrAppendFormat(out, "%.9g", value);
    } else {
      absl::StrAppend(out, std::isnan(value) ? "NaN"
                           : value < 0       ? "-Infinity"
                                             : "Infinity");
    }
  });
}

inline void PrintTurn(const Figures& figures) {
  absl::PrintF(R"({"ms": [%s], "loss": [%s]})"
               "\n",
               Listed(figures.milliseconds), Listed(figures.losses));
  std::fflush(stdout);
}

// What forwards left, when they ended and at the peak, and what was computed
// for backward then.
inline std::string ActivationsText(const StepMemoryReport& memory) {
  int64_t after_forward = 0;
  for (const auto& unit : memory.activations) after_forward += unit.bytes;
  const HeldMemory& held = memory.at_peak.held;
  return absl::StrFormat(
      R"({"after_forward": %d, "at_peak": %d, "temporary_at_peak": %d, )"
      R"("step_peak": %d})",
      after_forward, held[HeldKind::kActivations], held[HeldKind::kTemporary],
      memory.peak_bytes);
}

// Of libtorch's allocator for a device, the whole process: the peak of what was
// allocated since the peak was last asked for, and what is held for it; null on
// the CPU. `last_step`: an engine asks for the peak at the end of each step.
inline std::string DeviceText(at::Device device,
                              const StepMemoryReport& last_step) {
  if (device.is_cpu()) return "null";
  const auto stats =
      c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  constexpr auto kAll =
      static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return absl::StrFormat(
      R"({"allocated_peak": %d, "reserved": %d})",
      std::max(last_step.peak_bytes, stats.allocated_bytes[kAll].peak),
      stats.reserved_bytes[kAll].current);
}

}  // namespace tessera
#endif  // BENCHMARKS_TRAIN_FIGURES_H_
