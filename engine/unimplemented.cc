#include "engine/unimplemented.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace tessera {

absl::Status CheckImplemented(const proto::Config& config) {
  const proto::ZeroOptimization& zero = config.zero_optimization();
  const proto::Sharding& sharding = config.sharding();
  const proto::LeafModule& leaf = zero.leaf_module();
  const bool has_leaves =
      leaf.classes_size() + leaf.names_size() + leaf.name_suffixes_size() != 0;
  const std::pair<bool, const char*> parts[] = {
      {config.gradient_clipping() > 0,
       "gradient_clipping (1.0 where absent: write 0)"},
      {config.bf16().enabled(), "bf16.enabled"},
      {config.fp16().enabled(), "fp16.enabled"},
      {config.torch_autocast().enabled(), "torch_autocast.enabled"},
      {config.has_communication_data_type(), "communication_data_type"},
      {config.precision().has_buffer_dtype(), "precision.buffer_dtype"},
      {config.prescale_gradients(), "prescale_gradients"},
      {config.gradient_predivide_factor() != 1, "gradient_predivide_factor"},
      {zero.auto_stage(), "zero_optimization.stage \"auto\""},
      {has_leaves, "zero_optimization.leaf_module"},
      {sharding.unit_classes_size() != 0, "sharding.unit_classes"},
      {sharding.max_unit_numel() != proto::Sharding().max_unit_numel(),
       "sharding.max_unit_numel (EngineOptions has it)"},
      {sharding.ignored_parameters_size() != 0, "sharding.ignored_parameters"},
      {!sharding.reshard_after_forward() || sharding.has_reshard_group_size(),
       "sharding.reshard_after_forward"},
      {sharding.accumulation() != "each", "sharding.accumulation"},
      {sharding.gradient_reduction() != "mean", "sharding.gradient_reduction"},
      {sharding.check_writes(), "sharding.check_writes"},
  };
  std::vector<std::string> asked;
  for (const auto& [is_asked, key] : parts) {
    if (is_asked) asked.push_back(key);
  }
  if (asked.empty()) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat(
      "not available in this version: ", absl::StrJoin(asked, ", ")));
}

}  // namespace tessera
