#include "base/step_memory/held_memory.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/memory/ledger.h"

namespace tessera {

static_assert(kNumHeldKinds == kNumMemoryKinds + 3);

absl::string_view HeldKindName(HeldKind kind) {
  switch (kind) {
    case HeldKind::kActivations:
      return "activations";
    case HeldKind::kTemporary:
      return "temporary";
    case HeldKind::kTensors:
      return "tensors";
    default:
      return MemoryKindName(static_cast<MemoryKind>(kind));
  }
}

int64_t HeldMemory::total() const {
  return std::accumulate(by_kind.begin(), by_kind.end(), int64_t{0});
}

absl::string_view MemoryPhaseName(MemoryPhase phase) {
  switch (phase) {
    case MemoryPhase::kOutside:
      return "outside";
    case MemoryPhase::kForward:
      return "forward";
    case MemoryPhase::kBackward:
      return "backward";
    case MemoryPhase::kStep:
      return "step";
  }
  return "?";
}

std::string BytesText(int64_t bytes) {
  const auto count = static_cast<double>(bytes);
  constexpr int64_t kGib = int64_t{1} << 30;
  if (bytes >= kGib << 10) {
    return absl::StrFormat("%.1f TiB", count / static_cast<double>(kGib << 10));
  }
  if (bytes >= kGib) {
    return absl::StrFormat("%.1f GiB", count / static_cast<double>(kGib));
  }
  if (bytes >= 1 << 20) return absl::StrFormat("%.1f MiB", count / (1 << 20));
  if (bytes >= 1 << 10) return absl::StrFormat("%.1f KiB", count / (1 << 10));
  return absl::StrCat(bytes, " B");
}

std::string HeldTable(const HeldMoment& moment) {
  std::string text = absl::StrCat(BytesText(moment.held.total()), ", in ",
                                  MemoryPhaseName(moment.phase));
  if (!moment.unit.empty()) absl::StrAppend(&text, ", unit ", moment.unit);
  for (int i = 0; i < kNumHeldKinds; ++i) {
    const auto kind = static_cast<HeldKind>(i);
    if (moment.held[kind] == 0) continue;
    absl::StrAppendFormat(&text, "\n  %-14s %14s", HeldKindName(kind),
                          BytesText(moment.held[kind]));
  }
  return text;
}

std::string StepMemoryTable(const StepMemoryReport& report, size_t max_units) {
  std::string text = absl::StrCat("peak of ", BytesText(report.peak_bytes));
  if (report.device != "cpu") {
    absl::StrAppend(&text, " on ", report.device, ", ",
                    BytesText(report.reserved_peak_bytes), " reserved, ",
                    BytesText(report.host_peak_bytes), " on the host");
  }
  absl::StrAppend(&text, "; held then: ", HeldTable(report.at_peak));
  std::vector<UnitActivations> units = report.activations;
  std::stable_sort(units.begin(), units.end(),
                   [](const UnitActivations& a, const UnitActivations& b) {
                     return a.bytes > b.bytes;
                   });
  if (!units.empty()) absl::StrAppend(&text, "\nactivations by unit:");
  for (size_t i = 0; i < units.size() && i < max_units; ++i) {
    absl::StrAppendFormat(
        &text, "\n  %14s  %s", BytesText(units[i].bytes),
        units[i].unit.empty() ? "(before the first unit)" : units[i].unit);
  }
  if (units.size() > max_units) {
    absl::StrAppend(&text, "\n  and ", units.size() - max_units, " more units");
  }
  return text;
}

}  // namespace tessera
