#include "verify/oracle_groups.h"

#include <torch/torch.h>

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace tessera {
namespace {

// Returns what follows the last "::" that is not in brackets.
absl::string_view LastName(absl::string_view class_name) {
  int open = 0;
  size_t begin = 0;
  for (size_t i = 0; i < class_name.size(); ++i) {
    const char c = class_name[i];
    if (c == '<' || c == '(') ++open;
    if (c == '>' || c == ')') --open;
    if (c == ':' && open == 0) begin = i + 1;
  }
  return class_name.substr(begin);
}

bool IsUndecayed(absl::string_view name, absl::string_view class_name) {
  const absl::string_view own = name.substr(name.rfind('.') + 1);
  const absl::string_view last = LastName(class_name);
  return absl::StartsWith(own, "bias") || absl::EndsWith(own, "bias") ||
         absl::StrContains(last, "Norm") ||
         absl::StrContains(last, "Embedding");
}

bool Has(const OracleGroup& group, const torch::nn::Module& module,
         const std::string& name, const at::Tensor& tensor) {
  const std::string& class_name = module.name();
  for (const std::string& pattern : group.parameters) {
    if (FitsPattern(pattern, name)) return true;
  }
  for (const std::string& wanted : group.modules) {
    if (FitsClass(wanted, class_name)) return true;
  }
  if (group.claims && group.claims(module, name, tensor)) return true;
  if (group.hidden_matrices && tensor.dim() >= 2 && !tensor.is_complex()) {
    return !absl::StrContains(class_name, "Embedding") &&
           !absl::StrContains(name, "embed") &&
           !absl::StrContains(name, "head");
  }
  return group.undecayed && IsUndecayed(name, class_name);
}

}  // namespace

bool FitsPattern(absl::string_view pattern, absl::string_view name) {
  if (pattern.empty()) return name.empty();
  const absl::string_view rest = pattern.substr(1);
  if (pattern[0] == '*') {
    for (size_t i = 0; i <= name.size(); ++i) {
      if (FitsPattern(rest, name.substr(i))) return true;
    }
    return false;
  }
  if (name.empty()) return false;
  const bool fits = pattern[0] == '?' || pattern[0] == name[0];
  return fits && FitsPattern(rest, name.substr(1));
}

bool FitsClass(absl::string_view wanted, absl::string_view class_name) {
  wanted = absl::StripSuffix(wanted, "Impl");
  class_name = absl::StripSuffix(class_name, "Impl");
  return wanted == class_name || wanted == LastName(class_name);
}

std::map<const at::TensorImpl*, size_t> OracleGroupsOf(
    const torch::nn::Module& module, const std::vector<OracleGroup>& groups) {
  std::map<const at::TensorImpl*, size_t> group_of;
  for (size_t g = 0; g < groups.size(); ++g) {
    for (const auto& m : module.named_modules()) {
      for (const auto& p : m.value()->named_parameters(/*recurse=*/false)) {
        const std::string name =
            m.key().empty() ? p.key() : absl::StrCat(m.key(), ".", p.key());
        if (!Has(groups[g], *m.value(), name, p.value())) continue;
        group_of.try_emplace(p.value().unsafeGetTensorImpl(), g);
      }
    }
  }
  return group_of;
}

bool SetOracleOption(absl::string_view name, double value,
                     OracleStepOptions* options) {
  const std::map<absl::string_view, double OracleStepOptions::*> numbers = {
      {"lr", &OracleStepOptions::lr},
      {"beta1", &OracleStepOptions::beta1},
      {"beta2", &OracleStepOptions::beta2},
      {"eps", &OracleStepOptions::eps},
      {"weight_decay", &OracleStepOptions::weight_decay},
      {"momentum", &OracleStepOptions::momentum},
      {"dampening", &OracleStepOptions::dampening},
      {"alpha", &OracleStepOptions::alpha},
      {"lr_decay", &OracleStepOptions::lr_decay},
      {"min_coeff", &OracleStepOptions::min_coeff},
      {"max_coeff", &OracleStepOptions::max_coeff},
      {"r", &OracleStepOptions::r},
      {"weight_lr_power", &OracleStepOptions::weight_lr_power},
      {"eps2", &OracleStepOptions::eps2},
      {"beta2_decay", &OracleStepOptions::beta2_decay},
      {"d", &OracleStepOptions::d},
      {"initial_accumulator_value",
       &OracleStepOptions::initial_accumulator_value}};
  const std::map<absl::string_view, bool OracleStepOptions::*> flags = {
      {"bias_correction", &OracleStepOptions::bias_correction},
      {"amsgrad", &OracleStepOptions::amsgrad},
      {"nesterov", &OracleStepOptions::nesterov},
      {"centered", &OracleStepOptions::centered},
      {"maximize", &OracleStepOptions::maximize}};
  if (const auto it = numbers.find(name); it != numbers.end()) {
    options->*(it->second) = value;
  } else if (const auto it = flags.find(name); it != flags.end()) {
    options->*(it->second) = value != 0;
  } else {
    return false;
  }
  return true;
}

}  // namespace tessera
