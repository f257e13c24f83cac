#include "verify/engine_groups.h"

#include "absl/strings/str_cat.h"
#include "verify/oracle_groups.h"

namespace tessera {

absl::Status AddGroups(const std::vector<ParameterGroup>& program,
                       OracleOptions* oracle) {
  std::vector<OracleGroup> groups;
  for (const ParameterGroup& from : program) {
    OracleGroup& group = groups.emplace_back();
    group.name = from.name;
    if (from.use_muon) {
      return absl::UnimplementedError(
          "Verify: plain training, to compare with, does not know use_muon of "
          "EngineOptions::param_groups; say it in the configuration to verify");
    }
    group.options = oracle->optimizer;
    group.frozen = from.frozen;
    group.max_norm = from.gradient_clipping;
    group.adaptive = from.adaptive_gradient_clipping;
    group.parameters = from.parameters;
    group.modules = from.modules;
    group.claims = from.claims;
    for (const auto& [name, value] : from.options) {
      if (SetOracleOption(name, value, &group.options)) continue;
      return absl::UnimplementedError(absl::StrCat(
          "Verify: plain training, to compare with, does not know the option '",
          name, "' of EngineOptions::param_groups; leave it out to verify"));
    }
  }
  oracle->groups.insert(oracle->groups.begin(), groups.begin(), groups.end());
  return absl::OkStatus();
}

}  // namespace tessera
