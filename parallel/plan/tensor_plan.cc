#include "parallel/plan/tensor_plan.h"

#include <algorithm>
#include <set>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "parallel/plan/planned_parameters.h"
#include "parallel/plan/planned_run.h"
#include "sharding/partition/names.h"

namespace tessera {
namespace {

constexpr char kOption[] = "tensor plan";

// Along which dimension a pattern divides a parameter; -1: it stays whole.
absl::StatusOr<int64_t> DimOf(const PartPattern& pattern, bool of_module,
                              const at::Tensor& parameter) {
  const std::string& how = pattern.how;
  int64_t dim = -1;
  if (how == "whole") return dim;
  if (how == "colwise" || how == "vocabulary") {
    dim = 0;
  } else if (how == "colwise_qkv") {
    return DividedAlong(TensorPlacement::Shard(0, 3));
  } else if (how == "colwise_gate_up") {
    return DividedAlong(TensorPlacement::Shard(0, 2));
  } else if (how == "rowwise") {
    dim = parameter.dim() < 2 ? -1 : 1;
  } else if (!absl::SimpleAtoi(how, &dim) || dim < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        kOption, ": '", pattern.pattern, "' is to be divided '", how,
        "'; expected a dimension (0, 1, ...), colwise, colwise_qkv, "
        "colwise_gate_up, rowwise, vocabulary, or whole"));
  } else if (of_module && dim >= parameter.dim()) {
    return -1;
  }
  return dim;
}

absl::Status CheckDivisible(const PlannedParameter& parameter, int64_t how,
                            int ranks, const std::string& pattern) {
  if (how < 0) return absl::OkStatus();
  const auto [kind, dim, groups] = PlacementOf(how);
  if (CanDivide(parameter, PlacementOf(how), ranks)) return absl::OkStatus();
  const std::string why = !parameter.stays_whole.empty()
                              ? absl::StrCat("it ", parameter.stays_whole)
                              : absl::StrCat("expected a size there that ",
                                             groups * ranks, " divides");
  return absl::InvalidArgumentError(absl::StrCat(
      kOption, ": '", pattern, "' divides parameter '", parameter.name, "' [",
      absl::StrJoin(parameter.tensor.sizes(), ", "), "] along dimension ", dim,
      " among ", ranks, " ranks, which cannot be: ", why,
      ". Leave it whole by a pattern before this one."));
}

absl::Status CheckRanks(int ranks) {
  if (ranks >= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(kOption, ": expected 1 rank or more, got ", ranks));
}

std::string OwnerName(const std::string& parameter) {
  return std::string(OwnerOf(parameter));
}

}  // namespace

absl::StatusOr<TensorPlan> TensorPlanOf(
    const torch::nn::Module& module, const std::vector<PartPattern>& patterns,
    int ranks) {
  TESSERA_RETURN_IF_ERROR(CheckRanks(ranks));
  const PlanSubject subject{&module, ranks, PlannedParameters(module), {}, {}};
  const auto& parameters = subject.parameters;
  PartDims dims(parameters.size(), kStaysWhole);
  std::vector<bool> decided(parameters.size(), false);
  std::set<std::string> names;
  for (const PlannedParameter& each : parameters) {
    names.insert(each.name);
    if (!OwnerOf(each.name).empty()) names.insert(OwnerName(each.name));
  }
  for (const PartPattern& pattern : patterns) {
    PathPatterns paths(kOption, {pattern.pattern});
    for (size_t i = 0; i < parameters.size(); ++i) {
      const bool of_parameter = paths.Match(parameters[i].name);
      if (!of_parameter && !paths.Match(OwnerName(parameters[i].name))) {
        continue;
      }
      if (decided[i]) continue;
      decided[i] = true;
      TESSERA_ASSIGN_OR_RETURN(
          dims[i], DimOf(pattern, !of_parameter, parameters[i].tensor));
      TESSERA_RETURN_IF_ERROR(
          CheckDivisible(parameters[i], dims[i], ranks, pattern.pattern));
    }
    TESSERA_RETURN_IF_ERROR(paths.CheckMatched({names.begin(), names.end()},
                                               /*of_modules=*/true));
  }
  TensorPlan plan;
  SetParts(subject, dims, &plan);
  return plan;
}

absl::Status MeasureTensorPlan(const torch::nn::Module& module,
                               const std::function<at::Tensor()>& loss,
                               const TensorPlanOptions& options,
                               TensorPlan* plan) {
  TESSERA_RETURN_IF_ERROR(CheckRanks(plan->ranks));
  const PlanSubject subject{&module, plan->ranks, PlannedParameters(module),
                            loss, options};
  absl::flat_hash_map<std::string, int64_t> planned;
  for (const PlannedPart& each : plan->parts) {
    planned[each.name] =
        each.dim < 0
            ? each.dim
            : DividedAlong(TensorPlacement::Shard(each.dim, each.groups));
  }
  PartDims dims;
  for (const PlannedParameter& each : subject.parameters) {
    const auto found = planned.find(each.name);
    dims.push_back(found == planned.end() ? kStaysWhole : found->second);
    if (found != planned.end()) {
      planned.erase(found);
      if (dims.back() < 0) {
        return absl::InvalidArgumentError(
            absl::StrCat(kOption, ": the plan divides '", each.name,
                         "' along dimension ", dims.back()));
      }
    }
    TESSERA_RETURN_IF_ERROR(
        CheckDivisible(each, dims.back(), plan->ranks, each.name));
  }
  if (!planned.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(kOption, ": the module has no parameter '",
                     planned.begin()->first, "', which the plan divides"));
  }
  TESSERA_ASSIGN_OR_RETURN(
      const PlannedRun whole,
      RunPlanned(subject, PartDims(dims.size(), kStaysWhole)));
  TESSERA_ASSIGN_OR_RETURN(const PlannedRun run, RunPlanned(subject, dims));
  SetParts(subject, dims, plan);
  SetCosts(run, whole, plan);
  return absl::OkStatus();
}

namespace {

// A line of a plan's table: the parameters of repeated blocks that are divided
// in the same way.
struct PlanRow {
  std::string name;
  int64_t divided = 0;  // DividedAlong
  int parameters = 0;
};

int64_t DividedAlong(const PlannedPart& part) {
  return DividedAlong(TensorPlacement::Shard(part.dim, part.groups));
}

using Shorten = std::string (*)(const std::string& name);

std::string ByBlock(const std::string& name) { return WithoutNumbers(name); }
std::string ByOwner(const std::string& name) {
  return WithoutNumbers(name, /*owners=*/false);
}
std::string InFull(const std::string& name) { return name; }

// Adds parameters that have one short name and are divided in one way as a row;
// returns the others.
std::vector<PlannedPart> TakeRows(const std::vector<PlannedPart>& parts,
                                  Shorten shorten, std::vector<PlanRow>* rows) {
  absl::flat_hash_map<std::string, absl::flat_hash_set<int64_t>> dims;
  for (const PlannedPart& each : parts) {
    dims[shorten(each.name)].insert(DividedAlong(each));
  }
  std::vector<PlannedPart> others;
  absl::flat_hash_map<std::string, size_t> where;
  for (const PlannedPart& each : parts) {
    const std::string name = shorten(each.name);
    if (dims[name].size() > 1) {
      others.push_back(each);
      continue;
    }
    const auto [it, is_new] = where.try_emplace(name, rows->size());
    if (is_new) rows->push_back({each.name, DividedAlong(each), 0});
    PlanRow& row = (*rows)[it->second];
    if (++row.parameters > 1) row.name = name;
  }
  return others;
}

std::vector<PlanRow> RowsOfTable(std::vector<PlannedPart> parts) {
  std::vector<PlanRow> rows;
  for (const Shorten shorten : {&ByBlock, &ByOwner, &InFull}) {
    parts = TakeRows(parts, shorten, &rows);
  }
  return rows;
}

}  // namespace

std::string TensorPlan::ToString() const {
  const double all = static_cast<double>(part_numel) * ranks +
                     static_cast<double>(whole_numel);
  std::string text;
  if (parts.empty()) {
    absl::StrAppend(&text, "Tensor plan over ", ranks,
                    " ranks: all parameters stay whole.",
                    seconds > 0 ? " No way of dividing them was found to take "
                                  "less time."
                                : "",
                    "\n");
  } else {
    absl::StrAppendFormat(
        &text,
        "Tensor plan over %d ranks: each holds %.4g of %.4g million elements, "
        "%.4g million of parameters that stay whole.\n",
        ranks, static_cast<double>(part_numel + whole_numel) / 1e6, all / 1e6,
        static_cast<double>(whole_numel) / 1e6);
  }
  const std::vector<PlanRow> rows = RowsOfTable(parts);
  size_t width = 0;
  for (const PlanRow& row : rows) width = std::max(width, row.name.size());
  for (const PlanRow& row : rows) {
    const TensorPlacement placement = PlacementOf(row.divided);
    absl::StrAppendFormat(&text, "  %-*s  S(%d", static_cast<int>(width),
                          row.name, placement.dim);
    absl::StrAppend(&text,
                    placement.groups == 1
                        ? ")"
                        : absl::StrCat(", ", placement.groups, " groups)"));
    if (row.parameters > 1) absl::StrAppend(&text, "  x", row.parameters);
    absl::StrAppend(&text, "\n");
  }
  if (seconds > 0) {
    absl::StrAppendFormat(
        &text,
        "A micro-batch: %d collectives of %.4g MiB, %.4g GFLOP of products, "
        "an estimated %.4g ms with its update (%.4g ms with all parameters "
        "whole).\n",
        collectives, static_cast<double>(bytes) / (1 << 20),
        static_cast<double>(flops) / 1e9, seconds * 1e3, whole_seconds * 1e3);
  }
  if (!gathered.empty()) {
    absl::StrAppend(&text, "Operators without a rule for their parts gather: ",
                    absl::StrJoin(gathered, ", "), "\n");
  }
  return text;
}

}  // namespace tessera
