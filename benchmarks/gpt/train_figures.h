// Prints what benchmarks/train.cc measures as JSON.
#ifndef BENCHMARKS_GPT_TRAIN_FIGURES_H_
#define BENCHMARKS_GPT_TRAIN_FIGURES_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/memory/ledger.h"
#include "base/step_memory/held_memory.h"
#include "c10/core/CachingDeviceAllocator.h"

namespace tessera {

struct Figures {
  std::vector<double> milliseconds;  // of the timed steps
  std::vector<double> losses;
};

// Returns "1.5, 2.25". Reading a loss back gives the same bits. Python reads
// values that are not finite, too.
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

// How fast steps of all ranks are.
struct Speed {
  double median_ms = 0, least_ms = 0;  // of a step; 0: none was timed
  int64_t tokens = 0;                  // of a step
  int64_t flops_per_token = 0;
  double peak_flops = 0;  // a second, of all devices; 0: not known

  std::string Text() const {
    const double tokens_per_second =
        median_ms > 0 ? static_cast<double>(tokens) / median_ms * 1e3 : 0;
    const bool known = peak_flops > 0 && median_ms > 0;
    return absl::StrFormat(
        R"("step_ms": %.2f, "min_ms": %.2f, "tok_s": %.0f, )"
        R"("flops_per_token": %d, "mfu": %s)",
        median_ms, least_ms, tokens_per_second, flops_per_token,
        known
            ? absl::StrFormat("%.6g", tokens_per_second *
                                          static_cast<double>(flops_per_token) /
                                          peak_flops)
            : "null");
  }
};

// The peaks of the steps since Restart, or of all steps.
class Peaks {
 public:
  explicit Peaks(at::Device device) : device_(device) {}

  void Restart() {
    step_ = {};
    if (!device_.is_cpu()) Allocator()->resetPeakStats(device_.index());
  }
  // Records a step; call it after each one. An engine reads and resets a
  // device's peak then.
  void StepDone(const StepMemoryReport& step) {
    if (step.peak_bytes > step_.peak_bytes) step_ = step;
  }

  // Describes the step that held most: the activations that forwards left, when
  // they ended and at the peak, what was computed for backward then, and what
  // the device's ledger held.
  std::string ActivationsText() const {
    int64_t after_forward = 0;
    for (const auto& unit : step_.activations) after_forward += unit.bytes;
    const HeldMemory& held = step_.at_peak.held;
    int64_t ledger = 0;
    for (int i = 0; i < kNumMemoryKinds; ++i) ledger += held.by_kind[i];
    return absl::StrFormat(
        R"({"after_forward": %d, "at_peak": %d, "temporary_at_peak": %d, )"
        R"("step_peak": %d, "ledger_at_peak": %d})",
        after_forward, held[HeldKind::kActivations], held[HeldKind::kTemporary],
        step_.peak_bytes, ledger);
  }

  // Describes libtorch's allocator for the device, over the whole process: the
  // most that was allocated, and what is reserved now; null on the CPU.
  std::string DeviceText() const {
    if (device_.is_cpu()) return "null";
    const auto stats = Allocator()->getDeviceStats(device_.index());
    constexpr auto kAll =
        static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    // This is the allocator's peak alone where no engine resets it.
    return absl::StrFormat(
        R"({"allocated_peak": %d, "reserved": %d})",
        std::max(step_.peak_bytes, stats.allocated_bytes[kAll].peak),
        stats.reserved_bytes[kAll].current);
  }

 private:
  c10::DeviceAllocator* Allocator() const {
    return c10::getDeviceAllocator(device_.type());
  }

  const at::Device device_;
  StepMemoryReport step_;
};

}  // namespace tessera
#endif  // BENCHMARKS_GPT_TRAIN_FIGURES_H_
