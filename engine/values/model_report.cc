#include "engine/values/model_report.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "optim/kernels/element_step.h"
#include "optim/kernels/shaped_states.h"

namespace tessera {

StateBytes ResidentStateBytes(const ShardedModel& model,
                              const Optimization& optimization) {
  StateBytes bytes;
  for (const auto& flat : model.flats()) {
    bytes.parameters += flat->resident_bytes();
  }
  if (optimization.gradients() != nullptr) {
    bytes.gradients = optimization.gradients()->resident_bytes();
  }
  if (optimization.optimizer() != nullptr) {
    bytes.optimizer = optimization.optimizer()->resident_bytes();
  }
  return bytes;
}

StateBytes ReplicatedStateBytes(const ShardedModel& model,
                                const ParameterGroups& groups) {
  StateBytes bytes;
  for (const auto& flat : model.flats()) {
    const auto size = [&](at::ScalarType dtype) {
      return flat->layout().payload_numel() *
             static_cast<int64_t>(c10::elementSize(dtype));
    };
    bytes.parameters += size(flat->dtype());
    if (!flat->trainable()) continue;
    if (flat->separate_masters()) {
      bytes.parameters += size(flat->kept_master_dtype());
    }
    bytes.gradients += size(flat->reduce_dtype());
    if (flat->reduce_dtype() != flat->kept_gradient_dtype()) {
      bytes.gradients += size(flat->kept_gradient_dtype());
    }
    if (!groups.options.empty()) {
      const auto first = static_cast<size_t>(flat->parameters()[0].index);
      const OptimizerOptions& options =
          groups.options[static_cast<size_t>(groups.of[first])];
      const auto item =
          static_cast<int64_t>(c10::elementSize(flat->step_dtype()));
      bytes.optimizer +=
          StateBytesOf(options, item, flat->layout().payload_numel());
      bytes.optimizer +=
          item * ShapedNumelOf(FormulaOf(options), flat->parameters());
    }
  }
  return bytes;
}

std::vector<std::string> DescribeUnits(const ShardedModel& model) {
  std::vector<std::string> lines;
  constexpr size_t kNamed = 4;
  for (const auto& flat : model.flats()) {
    int64_t numel = 0;
    // Parameters that the unit's path says nothing of: the root's, and small
    // ones of all units.
    const std::string path = flat->name().substr(0, flat->name().find(' '));
    std::vector<std::string> others;
    for (const auto& p : flat->parameters()) {
      numel += p.of_module().numel();
      if (p.name == path || absl::StartsWith(p.name, absl::StrCat(path, "."))) {
        continue;
      }
      if (others.size() == kNamed) others.back() = "...";
      if (others.size() < kNamed) others.push_back(p.name);
    }
    lines.push_back(absl::StrCat(
        flat->name(), ": ", flat->parameters().size(), " parameters, ", numel,
        " elements", others.empty() ? "" : " (with ",
        absl::StrJoin(others, ", "), others.empty() ? "" : ")"));
  }
  return lines;
}

}  // namespace tessera
