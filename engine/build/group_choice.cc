#include "engine/build/group_choice.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status.h"
#include "config/config.pb.h"
#include "config/options/option_values.h"
#include "optim/algorithms/coefficients.h"
#include "optim/algorithms/option_names.h"
#include "optim/custom/custom_optimizer.h"
#include "sharding/partition/module_walk.h"
#include "sharding/partition/names.h"
#include "torch/nn/module.h"

namespace tessera {
namespace {

constexpr char kDefault[] = "default", kNoDecay[] = "no_decay",
               kMuon[] = "muon";

ParameterGroup GroupOf(const proto::ParamGroup& config) {
  ParameterGroup group;
  group.name = config.name();
  group.parameters.assign(config.parameters().begin(),
                          config.parameters().end());
  group.modules.assign(config.modules().begin(), config.modules().end());
  group.frozen = config.frozen();
  group.use_muon = config.use_muon();
  if (config.has_gradient_clipping()) {
    group.gradient_clipping = config.gradient_clipping();
  }
  if (config.has_adaptive_gradient_clipping()) {
    group.adaptive_gradient_clipping = config.adaptive_gradient_clipping();
  }
  group.options = OptionValuesOf(config.params());
  return group;
}

// A bias, or of a norm or an embedding, by the names that people give them.
bool IsUndecayed(const ModuleWalk::Parameter& p,
                 const std::string& class_name) {
  const size_t dot = p.name.rfind('.');
  const absl::string_view last =
      dot == p.name.npos ? absl::string_view(p.name)
                         : absl::string_view(p.name).substr(dot + 1);
  return absl::StartsWith(last, "bias") || absl::EndsWith(last, "bias") ||
         absl::StrContains(LastComponent(class_name), "Norm") ||
         absl::StrContains(LastComponent(class_name), "Embedding");
}

// A hidden matrix, as the method is meant for: neither embedding nor output.
bool IsForMuon(const ModuleWalk::Parameter& p, const std::string& class_name) {
  return p.tensor.dim() >= 2 && !p.tensor.is_complex() &&
         !absl::StrContains(class_name, "Embedding") &&
         !absl::StrContains(p.name, "embed") &&
         !absl::StrContains(p.name, "head");
}

// What one group means in this module.
class Claims {
 public:
  Claims(const ParameterGroup& group, std::string where)
      : group_(group),
        where_(std::move(where)),
        patterns_(absl::StrCat(where_, ".parameters"), group.parameters),
        classes_(absl::StrCat(where_, ".modules"), group.modules) {}

  bool Claim(const ModuleWalk::Parameter& p, const torch::nn::Module& module) {
    // Each of them, so that all know whether they have matched.
    bool claimed = patterns_.Match(p.name);
    claimed = classes_.Match(module.name()) || claimed;
    claimed =
        (group_.claims && group_.claims(module, p.name, p.tensor)) || claimed;
    any_ = any_ || claimed;
    return claimed;
  }

  absl::Status CheckMatched(const absl::flat_hash_set<std::string>& classes,
                            const std::vector<std::string>& parameters) const {
    TESSERA_RETURN_IF_ERROR(patterns_.CheckMatched(parameters, false));
    TESSERA_RETURN_IF_ERROR(classes_.CheckMatched(classes));
    if (any_) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        where_, ": the group '", group_.name, "' has no parameters"));
  }

 private:
  const ParameterGroup& group_;
  const std::string where_;
  PathPatterns patterns_;
  ClassNames classes_;
  bool any_ = false;
};

absl::Status CheckClipping(const char* what, std::optional<double> clipping) {
  const double value = clipping.value_or(0);
  if (std::isfinite(value) && value >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(what, ": expected a number of at least 0, got ", value));
}

class Chooser {
 public:
  Chooser(const proto::Optimizer& config,
          const std::vector<ParameterGroup>& program,
          const OptimizerOptions& base,
          const std::optional<OptimizerOptions>& muon,
          const torch::nn::Module& module)
      : walk_(WalkModule(module)), base_(base), muon_(muon) {
    for (const ParameterGroup& group : program) {
      Add(group,
          absl::StrCat("EngineOptions::param_groups[", groups_.size(), "]"));
    }
    for (int i = 0; i < config.param_groups_size(); ++i) {
      Add(GroupOf(config.param_groups(i)),
          absl::StrCat("optimizer.param_groups[", i, "]"));
    }
    no_decay_ = config.no_decay() == "auto";
  }

  absl::StatusOr<GroupChoice> Choose(const std::vector<UnitPlan>& units) {
    choice_.groups.options = {base_};
    choice_.groups.names = {kDefault};
    choice_.frozen = {false};
    for (size_t g = 0; g < groups_.size(); ++g) {
      TESSERA_RETURN_IF_ERROR(Annotate(AddOptions(groups_[g]), places_[g]));
    }
    TESSERA_RETURN_IF_ERROR(ClaimAll());
    if (no_decay_) {
      OptimizerOptions options = base_;
      options.weight_decay = 0;
      AddAutomatic(kNoDecay, options, IsUndecayed);
    }
    if (muon_.has_value()) AddAutomatic(kMuon, *muon_, IsForMuon);
    choice_.max_norms = OfGroups(&ParameterGroup::gradient_clipping);
    choice_.adaptive = OfGroups(&ParameterGroup::adaptive_gradient_clipping);
    for (const UnitPlan& unit : units) {
      for (const NamedParameter& p : unit.parameters) SetGroupOf(p);
    }
    return std::move(choice_);
  }

 private:
  void SetGroupOf(const NamedParameter& p) {
    std::vector<int>& of = choice_.groups.of;
    const auto index = static_cast<size_t>(p.index);
    if (of.size() <= index) of.resize(index + 1);
    const auto it = group_of_.find(p.tensor.unsafeGetTensorImpl());
    if (it != group_of_.end()) of[index] = it->second;
  }

  void Add(ParameterGroup group, std::string where) {
    groups_.push_back(std::move(group));
    places_.push_back(std::move(where));
  }

  absl::Status AddOptions(const ParameterGroup& group) {
    const std::vector<std::string>& names = choice_.groups.names;
    if (group.name.empty() || group.name == kNoDecay || group.name == kMuon ||
        std::find(names.begin(), names.end(), group.name) != names.end()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "expected a name that no other group has, got '", group.name, "'"));
    }
    if (group.use_muon && !muon_.has_value()) {
      return absl::InvalidArgumentError("use_muon: the optimizer is not Muon");
    }
    TESSERA_RETURN_IF_ERROR(
        CheckClipping("gradient_clipping", group.gradient_clipping));
    TESSERA_RETURN_IF_ERROR(CheckClipping("adaptive_gradient_clipping",
                                          group.adaptive_gradient_clipping));
    OptimizerOptions options = group.use_muon ? *muon_ : base_;
    TESSERA_RETURN_IF_ERROR(SetOptions(group.options, &options));
    choice_.groups.options.push_back(options);
    choice_.groups.names.push_back(group.name);
    choice_.frozen.push_back(group.frozen);
    return absl::OkStatus();
  }

  // After "default" the groups follow in their order. Empty: none has one.
  std::vector<std::optional<double>> OfGroups(
      std::optional<double> ParameterGroup::*member) const {
    std::vector<std::optional<double>> values(choice_.groups.options.size());
    bool any = false;
    for (size_t g = 0; g < groups_.size(); ++g) {
      values[g + 1] = groups_[g].*member;
      any = any || values[g + 1].has_value();
    }
    if (!any) values.clear();
    return values;
  }

  absl::Status ClaimAll() {
    absl::flat_hash_set<std::string> classes;
    for (const auto& m : walk_.modules) classes.insert(m.module->name());
    std::vector<Claims> claims;
    for (size_t g = 0; g < groups_.size(); ++g) {
      claims.emplace_back(groups_[g], places_[g]);
    }
    for (const ModuleWalk::Parameter& p : walk_.parameters) {
      const torch::nn::Module& module =
          *walk_.modules[static_cast<size_t>(p.module)].module;
      for (size_t g = 0; g < claims.size(); ++g) {
        if (!claims[g].Claim(p, module)) continue;
        if (groups_[g].use_muon &&
            (p.tensor.dim() < 2 || p.tensor.is_complex())) {
          return absl::InvalidArgumentError(absl::StrCat(
              places_[g], ": use_muon: parameter '", p.name,
              "' is no real matrix: it has ", p.tensor.dim(), " dims"));
        }
        TESSERA_RETURN_IF_ERROR(Give(p, static_cast<int>(g) + 1));
      }
    }
    std::vector<std::string> names;
    for (const auto& p : walk_.parameters) names.push_back(p.name);
    for (const Claims& each : claims) {
      TESSERA_RETURN_IF_ERROR(each.CheckMatched(classes, names));
    }
    return absl::OkStatus();
  }

  // A tied parameter has several names, which may be of one group.
  absl::Status Give(const ModuleWalk::Parameter& p, int group) {
    const auto [it, first] =
        group_of_.emplace(p.tensor.unsafeGetTensorImpl(), group);
    if (first || it->second == group) return absl::OkStatus();
    const std::vector<std::string>& names = choice_.groups.names;
    return absl::InvalidArgumentError(absl::StrCat(
        "parameter '", p.name, "' is claimed by two groups, '",
        names[static_cast<size_t>(it->second)], "' and '",
        names[static_cast<size_t>(group)], "'; let one of them leave it out"));
  }

  // Adds a group of the parameters that are in none yet and that `is_meant`; a
  // tied one only if all of it is meant.
  template <typename IsMeant>
  void AddAutomatic(const char* name, const OptimizerOptions& options,
                    const IsMeant& is_meant) {
    const int group = static_cast<int>(choice_.groups.options.size());
    choice_.groups.options.push_back(options);
    choice_.groups.names.push_back(name);
    choice_.frozen.push_back(false);
    absl::flat_hash_set<const at::TensorImpl*> meant, not_meant;
    for (const ModuleWalk::Parameter& p : walk_.parameters) {
      const auto& m = walk_.modules[static_cast<size_t>(p.module)];
      const bool is = is_meant(p, m.module->name());
      (is ? meant : not_meant).insert(p.tensor.unsafeGetTensorImpl());
    }
    for (const at::TensorImpl* const p : meant) {
      if (!not_meant.contains(p)) group_of_.emplace(p, group);
    }
  }

  const ModuleWalk walk_;
  const OptimizerOptions base_;
  const std::optional<OptimizerOptions> muon_;
  std::vector<ParameterGroup> groups_;
  std::vector<std::string> places_;  // of groups, for messages
  bool no_decay_ = false;
  GroupChoice choice_;
  absl::flat_hash_map<const at::TensorImpl*, int> group_of_;
};

}  // namespace

absl::StatusOr<GroupChoice> ChooseGroups(
    const proto::Optimizer& config, const std::vector<ParameterGroup>& program,
    const OptimizerOptions& base, const std::optional<OptimizerOptions>& muon,
    const torch::nn::Module& module, const std::vector<UnitPlan>& units) {
  return Chooser(config, program, base, muon, module).Choose(units);
}

std::function<int(const NamedParameter&)> PartsOf(
    const ParameterGroups& groups) {
  return [&groups](const NamedParameter& p) {
    const int group = groups.of[static_cast<size_t>(p.index)];
    return static_cast<int>(
        FormulaOf(groups.options[static_cast<size_t>(group)]));
  };
}

const OptimizerOptions* OptimizerOf(const ParameterGroups& groups,
                                    const FlatPlan& flat) {
  if (groups.options.empty()) return nullptr;
  const auto first = static_cast<size_t>(flat.parameters[0].index);
  return &groups.options[static_cast<size_t>(groups.of[first])];
}

std::vector<double> AdaptiveClippingOf(const GroupChoice& choice,
                                       double of_all) {
  std::vector<double> clipping(choice.groups.options.size(), of_all);
  for (size_t g = 0; g < choice.adaptive.size(); ++g) {
    clipping[g] = choice.adaptive[g].value_or(of_all);
  }
  if (std::all_of(clipping.begin(), clipping.end(),
                  [](double c) { return c == 0; })) {
    clipping.clear();
  }
  return clipping;
}

std::string Describe(const GroupChoice& choice) {
  std::string text;
  const ParameterGroups& groups = choice.groups;
  if (groups.options[0].custom != nullptr) {
    absl::StrAppend(&text, DescribeCustom(*groups.options[0].custom), " ");
  }
  for (size_t g = 0; g < groups.options.size(); ++g) {
    absl::StrAppend(&text, "'", groups.names[g], "'",
                    choice.frozen[g] ? " frozen" : "");
    if (!choice.max_norms.empty() && choice.max_norms[g].has_value()) {
      absl::StrAppendFormat(&text, " gradient_clipping %.17g",
                            *choice.max_norms[g]);
    }
    if (!choice.adaptive.empty() && choice.adaptive[g].has_value()) {
      absl::StrAppendFormat(&text, " adaptive_gradient_clipping %.17g",
                            *choice.adaptive[g]);
    }
    for (const std::string& name : OptionNames(groups.options[g].algorithm)) {
      absl::StrAppendFormat(&text, " %s %.17g", name,
                            *OptionOf(name, groups.options[g]));
    }
    absl::StrAppend(&text, "; ");
  }
  absl::StrAppend(&text, "group of each parameter:");
  for (const int group : groups.of) absl::StrAppend(&text, " ", group);
  return text;
}

}  // namespace tessera
