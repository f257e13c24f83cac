#include "parallel/pipeline/stage_plan.h"

#include <algorithm>
#include <set>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/edit_distance.h"
#include "base/status.h"
#include "parallel/pipeline/linear_partition.h"

namespace tessera {
namespace {

using Parameters = std::vector<PipelineParameter>;

// What is divided: a weight of each parameter.
struct StageWeights {
  std::vector<double> of;
  const char* what = "";
};

// Returns where runs of parameters of one unit begin.
std::vector<size_t> UnitBegins(const Parameters& parameters) {
  std::vector<size_t> begins;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (i == 0 || parameters[i].unit != parameters[i - 1].unit) {
      begins.push_back(i);
    }
  }
  return begins;
}

// A unit's weight for kUniform is that of its first parameter.
StageWeights WeightsOf(const Parameters& parameters,
                       const std::vector<size_t>& unit_begins,
                       PipelinePartition partition) {
  StageWeights weights;
  weights.of.resize(parameters.size(), 0);
  const auto of_each = [&](const char* what, auto weight_of) {
    weights.what = what;
    for (size_t i = 0; i < parameters.size(); ++i) {
      weights.of[i] = static_cast<double>(weight_of(parameters[i]));
    }
  };
  const bool costs =
      std::any_of(parameters.begin(), parameters.end(),
                  [](const PipelineParameter& each) { return each.cost > 0; });
  if (partition == PipelinePartition::kUniform) {
    weights.what = "units";
    for (const size_t begin : unit_begins) weights.of[begin] = 1;
  } else if (partition == PipelinePartition::kBest && costs) {
    of_each("predicted time", [](const auto& each) { return each.cost; });
  } else {
    of_each("parameters", [](const auto& each) { return each.numel; });
  }
  return weights;
}

absl::Status SplitError(absl::string_view point, absl::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat("pipeline.split_points: '", point, "' ", what));
}

// Returns parameters and the modules around them.
std::vector<std::string> NamesIn(const Parameters& parameters) {
  std::set<std::string> names;
  for (const PipelineParameter& each : parameters) {
    for (size_t end = each.name.size(); end != each.name.npos && end > 0;
         end = each.name.rfind('.', end - 1)) {
      names.insert(each.name.substr(0, end));
    }
  }
  return {names.begin(), names.end()};
}

absl::StatusOr<size_t> BeginOf(const std::string& point,
                               const Parameters& parameters) {
  const auto found = std::find_if(
      parameters.begin(), parameters.end(), [&](const PipelineParameter& each) {
        return each.name == point ||
               absl::StartsWith(each.name, absl::StrCat(point, "."));
      });
  if (found != parameters.end()) {
    return static_cast<size_t>(found - parameters.begin());
  }
  const std::string nearest = NearestName(point, NamesIn(parameters));
  return SplitError(
      point,
      absl::StrCat("is not a parameter, nor a module that has some",
                   nearest.empty()
                       ? "; expected a name as in named_parameters()"
                       : absl::StrCat(", did you mean '", nearest, "'?")));
}

absl::StatusOr<std::vector<size_t>> BeginsOfPoints(
    const Parameters& parameters, int stages,
    const std::vector<std::string>& points) {
  if (points.size() + 1 != static_cast<size_t>(stages)) {
    return absl::InvalidArgumentError(
        absl::StrCat("pipeline.split_points: expected ", stages - 1,
                     " for pipeline.stages ", stages, ", got ", points.size()));
  }
  std::vector<size_t> begins = {0};
  for (const std::string& point : points) {
    TESSERA_ASSIGN_OR_RETURN(const size_t begin, BeginOf(point, parameters));
    if (begin == 0) {
      return SplitError(point,
                        "begins with the first parameter that is used, so "
                        "the first stage would have none");
    }
    if (begin == begins.back()) {
      return SplitError(point,
                        absl::StrCat("begins with '", parameters[begin].name,
                                     "', where the stage before begins, too"));
    }
    if (begin < begins.back()) {
      return SplitError(
          point,
          absl::StrCat("is used before '", parameters[begins.back()].name,
                       "', where an earlier stage begins; expected the "
                       "order in which the forward uses them"));
    }
    begins.push_back(begin);
  }
  return begins;
}

absl::StatusOr<std::vector<size_t>> BeginsOfUnits(
    const std::vector<size_t>& unit_begins, const StageWeights& weights,
    int stages) {
  if (unit_begins.size() < static_cast<size_t>(stages)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "pipeline.stages ", stages, ": expected at least as many units, got ",
        unit_begins.size(),
        "; name pipeline.split_points, choose smaller units, or have fewer "
        "stages"));
  }
  std::vector<double> unit_weights(unit_begins.size(), 0);
  for (size_t unit = 0, i = 0; i < weights.of.size(); ++i) {
    if (unit + 1 < unit_begins.size() && i == unit_begins[unit + 1]) ++unit;
    unit_weights[unit] += weights.of[i];
  }
  std::vector<size_t> begins;
  for (const size_t unit : LinearPartition(unit_weights, stages)) {
    begins.push_back(unit_begins[unit]);
  }
  return begins;
}

// "equal shares of predicted time, stages begin at 'token.weight' (48 %),
// 'block1.norm.weight' (52 %)".
std::string ReasonOf(const Parameters& parameters,
                     const std::vector<size_t>& begins,
                     const PipelinePlan& plan, absl::string_view by) {
  std::vector<std::string> stages;
  for (size_t s = 0; s < begins.size(); ++s) {
    stages.push_back(absl::StrFormat(
        "'%s' (%.0f %%)", parameters[begins[s]].name, 100 * plan.share[s]));
  }
  return absl::StrCat(by, ", stages begin at ", absl::StrJoin(stages, ", "));
}

}  // namespace

absl::StatusOr<PipelinePlan> PlanStages(
    const std::vector<PipelineParameter>& parameters, int stages,
    PipelinePartition partition, const std::vector<std::string>& split_points) {
  if (stages < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("pipeline.stages: expected at least 1, got ", stages));
  }
  const std::vector<size_t> unit_begins = UnitBegins(parameters);
  const StageWeights weights = WeightsOf(parameters, unit_begins, partition);
  std::vector<size_t> begins;
  if (split_points.empty()) {
    TESSERA_ASSIGN_OR_RETURN(begins,
                             BeginsOfUnits(unit_begins, weights, stages));
  } else {
    TESSERA_ASSIGN_OR_RETURN(begins,
                             BeginsOfPoints(parameters, stages, split_points));
  }
  PipelinePlan plan;
  plan.share.resize(begins.size(), 0);
  double all = 0;
  for (size_t i = 0, stage = 0; i < parameters.size(); ++i) {
    if (stage + 1 < begins.size() && i == begins[stage + 1]) ++stage;
    plan.stage.push_back(static_cast<int>(stage));
    plan.share[stage] += weights.of[i];
    all += weights.of[i];
  }
  for (double& share : plan.share) {
    share = all > 0 ? share / all : 1 / static_cast<double>(stages);
  }
  plan.reason =
      ReasonOf(parameters, begins, plan,
               split_points.empty()
                   ? absl::StrCat("equal shares of ", weights.what)
                   : absl::StrCat("split_points, shares of ", weights.what));
  return plan;
}

std::string LayerOf(absl::string_view parameter) {
  const size_t dot = parameter.rfind('.');
  const absl::string_view module =
      dot == parameter.npos ? "" : parameter.substr(0, dot);
  size_t ends_in_number = module.size();
  for (size_t begin = 0; begin < module.size();) {
    const size_t end = std::min(module.find('.', begin), module.size());
    const absl::string_view part = module.substr(begin, end - begin);
    if (std::all_of(part.begin(), part.end(), absl::ascii_isdigit)) {
      return std::string(module.substr(0, end));
    }
    if (absl::ascii_isdigit(part.back()) && ends_in_number == module.size()) {
      ends_in_number = end;
    }
    begin = end + 1;
  }
  return std::string(module.substr(0, ends_in_number));
}

}  // namespace tessera
