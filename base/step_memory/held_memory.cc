#include "base/step_memory/held_memory.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/memory/ledger.h"

namespace tessera {
namespace {

constexpr double kLeastShareInTable = 0.01;

bool IsBelow(int64_t bytes, double share, int64_t total) {
  return static_cast<double>(bytes) < share * static_cast<double>(total);
}

// Counts the rows of a table that are left out.
struct HiddenRows {
  int count = 0;
  int64_t bytes = 0;

  void Add(int64_t row) {
    ++count;
    bytes += row;
  }
  void AppendTo(absl::string_view what, std::string* text) const {
    if (count == 0) return;
    absl::StrAppendFormat(text, "\n  (%d more %s%s, %s in all)", count, what,
                          count == 1 ? "" : "s", BytesText(bytes));
  }
};

}  // namespace

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

std::string HeldTable(const HeldMoment& moment, double least_share) {
  const int64_t total = moment.held.total();
  const bool outside = moment.phase == MemoryPhase::kOutside;
  std::string text =
      absl::StrCat(BytesText(total), outside ? ", outside of a step" : ", in ",
                   outside ? "" : MemoryPhaseName(moment.phase));
  if (!moment.unit.empty()) absl::StrAppend(&text, ", unit ", moment.unit);
  HiddenRows hidden;
  for (int i = 0; i < kNumHeldKinds; ++i) {
    const auto kind = static_cast<HeldKind>(i);
    const int64_t bytes = moment.held[kind];
    if (bytes == 0) continue;
    if (IsBelow(bytes, least_share, total)) {
      hidden.Add(bytes);
      continue;
    }
    absl::StrAppendFormat(&text, "\n  %-14s %14s", HeldKindName(kind),
                          BytesText(bytes));
  }
  hidden.AppendTo("kind", &text);
  return text;
}

std::string StepMemoryTable(const StepMemoryReport& report, size_t max_units) {
  std::string text = absl::StrCat("peak of ", BytesText(report.peak_bytes));
  if (report.device != "cpu") {
    absl::StrAppend(&text, " on ", report.device, ", ",
                    BytesText(report.reserved_peak_bytes), " reserved, ",
                    BytesText(report.host_peak_bytes), " on the host");
  }
  absl::StrAppend(
      &text, "; held then: ", HeldTable(report.at_peak, kLeastShareInTable));
  std::vector<UnitActivations> units = report.activations;
  std::stable_sort(units.begin(), units.end(),
                   [](const UnitActivations& a, const UnitActivations& b) {
                     return a.bytes > b.bytes;
                   });
  if (units.empty()) return text;
  absl::StrAppend(&text, "\nactivations by unit:");
  int64_t total = 0;
  for (const UnitActivations& unit : units) total += unit.bytes;
  HiddenRows hidden;
  size_t shown = 0;
  for (const UnitActivations& unit : units) {
    if (shown == max_units || IsBelow(unit.bytes, kLeastShareInTable, total)) {
      hidden.Add(unit.bytes);
      continue;
    }
    ++shown;
    absl::StrAppendFormat(
        &text, "\n  %14s  %s", BytesText(unit.bytes),
        unit.unit.empty() ? "(before the first unit)" : unit.unit);
  }
  hidden.AppendTo("unit", &text);
  return text;
}

}  // namespace tessera
