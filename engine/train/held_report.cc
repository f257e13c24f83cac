#include "engine/train/held_report.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/torch/device_ledger.h"
#include "c10/core/CachingDeviceAllocator.h"
#include "engine/plan/plan_changes.h"

namespace tessera {
namespace {

constexpr size_t kMaxUnits = 5, kMaxChanges = 2;

struct UnitRow {
  std::string name;
  int64_t parameters = 0, gradients = 0, optimizer = 0, working = 0;
  int64_t activations = 0;
  int64_t total() const {
    return parameters + gradients + optimizer + working + activations;
  }
};

// Flats of one unit's name are one row, as in the refusal's activations.
std::vector<UnitRow> UnitRows(const ShardedModel& model,
                              const Optimization& optimization,
                              const StepMemory::Refusal& refusal) {
  std::vector<UnitRow> rows;
  absl::flat_hash_map<std::string, size_t> row_of;
  const auto row = [&](const std::string& name) -> UnitRow& {
    const auto [it, added] = row_of.try_emplace(name, rows.size());
    if (added) {
      rows.emplace_back();
      rows.back().name = name;
    }
    return rows[it->second];
  };
  const bool has_gradients = optimization.gradients() != nullptr &&
                             refusal.moment.held[HeldKind::kGradients] > 0;
  for (size_t i = 0; i < model.flats().size(); ++i) {
    const FlatParameter& flat = *model.flats()[i];
    UnitRow& unit = row(flat.name());
    unit.parameters += flat.resident_bytes();
    if (has_gradients) {
      unit.gradients += optimization.gradients()->of(i).resident_bytes();
    }
    if (optimization.optimizer() != nullptr && flat.trainable()) {
      for (const TieredBuffer& state : flat.states().moments()) {
        unit.optimizer += state.resident_bytes();
      }
      for (const ShapedState& state :
           optimization.optimizer()->states().factored(i).all()) {
        unit.optimizer += static_cast<int64_t>(state.values.nbytes());
      }
    }
    unit.working += flat.gathered_bytes();
  }
  for (const UnitActivations& unit : refusal.activations) {
    row(unit.unit).activations += unit.bytes;
  }
  std::stable_sort(
      rows.begin(), rows.end(),
      [](const UnitRow& a, const UnitRow& b) { return a.total() > b.total(); });
  return rows;
}

void AddKind(absl::string_view kind, int64_t bytes, std::string* line) {
  if (bytes > 0) absl::StrAppend(line, "  ", kind, " ", BytesText(bytes));
}

void AddUnits(const std::vector<UnitRow>& rows, std::string* text) {
  if (!rows.empty()) absl::StrAppend(text, "\nlargest units:");
  for (size_t i = 0; i < std::min(rows.size(), kMaxUnits); ++i) {
    const UnitRow& unit = rows[i];
    absl::StrAppend(text, "\n  ",
                    unit.name.empty() ? "(before the first unit)" : unit.name,
                    ":");
    AddKind("parameters", unit.parameters, text);
    AddKind("gradients", unit.gradients, text);
    AddKind("optimizer", unit.optimizer, text);
    AddKind("working", unit.working, text);
    AddKind("activations", unit.activations, text);
  }
}

void AddDevice(const at::Device& device, std::string* text) {
  if (device.is_cpu()) return;
  const auto stats =
      c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  constexpr auto kAll =
      static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto& allocated = stats.allocated_bytes[kAll];
  const auto& reserved = stats.reserved_bytes[kAll];
  absl::StrAppend(text, "\n", device.str(), ": ", BytesText(allocated.current),
                  " in tensors and buffers (peak ", BytesText(allocated.peak),
                  "), ", BytesText(reserved.current), " reserved (peak ",
                  BytesText(reserved.peak), ")");
}

// The configured stage's peak, and what would fit instead.
// `held`: where memory was refused.
void AddPlan(const PlanReport& plan, int stage, int64_t held,
             std::string* text) {
  if (static_cast<size_t>(stage) >= plan.stages.size()) return;
  const StagePlan& planned = plan.stages[static_cast<size_t>(stage)];
  absl::StrAppend(text, "\nplanned at stage ", stage, ":");
  for (int k = 0; k < kNumPlanKinds; ++k) {
    const auto kind = static_cast<PlanKind>(k);
    AddKind(PlanKindName(kind), planned.peak[kind], text);
  }
  absl::StrAppend(text, "  total ", BytesText(planned.peak.total()), ", of ",
                  BytesText(plan.memory_bytes), " that a rank has");
  if (held < plan.memory_bytes / 10 * 9) {
    absl::StrAppend(text, "\nmemory was refused below that: plan with ",
                    BytesText(held), " (PlanOptions::memory_bytes)");
  }
  const std::vector<PlanChange> changes =
      CheapestThatFit(plan, stage, kMaxChanges);
  if (changes.empty()) {
    absl::StrAppend(text,
                    "\nno change of stage, micro-batch and recomputation is "
                    "enough: more ranks, or a 16-bit dtype");
  }
  for (const PlanChange& change : changes) {
    absl::StrAppend(text, "\nwould fit, with ", BytesText(change.peak_bytes),
                    ": ", change.what);
  }
}

}  // namespace

std::string HeldReport(const ShardedModel& model,
                       const Optimization& optimization, const PlanReport* plan,
                       const StepMemory::Refusal& refusal) {
  const std::string where =
      refusal.device == model.device().str() && refusal.device == "cpu"
          ? ""
          : absl::StrCat(" on ", refusal.device);
  std::string text = absl::StrCat(
      "held by rank ", model.comm()->rank(), "/", model.comm()->world_size(),
      where, " when it was refused: ", HeldTable(refusal.moment));
  if (refusal.moment.phase != MemoryPhase::kOutside) {
    absl::StrAppend(&text, "\npeak of the step until then: ",
                    BytesText(refusal.peak_bytes));
  }
  AddUnits(UnitRows(model, optimization, refusal), &text);
  AddDevice(model.device(), &text);
  if (plan != nullptr) {
    AddPlan(*plan, model.stage(), refusal.moment.held.total(), &text);
  }
  return text;
}

std::string RefusalReport::Text(const absl::Status& status) const {
  if (!absl::IsResourceExhausted(status)) return "";
  StepMemory& memory = StepMemory::Global();
  if (memory.refusals() == before_) {
    if (model_.device().is_cpu()) return "";
    memory.NoteRefusal(LedgerOf(model_.device()));
  }
  return absl::StrCat(
      "\n", HeldReport(model_, optimization_, plan_, memory.last_refusal()));
}

absl::Status RefusalReport::In(const absl::Status& status) const {
  const std::string text = Text(status);
  if (text.empty()) return status;
  return absl::Status(status.code(), absl::StrCat(status.message(), text));
}

}  // namespace tessera
