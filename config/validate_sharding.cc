#include <cstdint>

#include "config/defaults.h"
#include "config/validate.h"

namespace tessera {
namespace {

void ResolveZero(proto::ZeroOptimization* zero, Faults* faults) {
  if (zero->has_auto_stage() && !zero->auto_stage()) zero->clear_auto_stage();
  FillDefaults(zero);
  if (zero->stage() < 0 || zero->stage() > 3) {
    faults->Add("zero_optimization.stage", "expected 0, 1, 2 or 3, got ",
                zero->stage());
  }
  faults->CheckAtLeast("zero_optimization.reduce_bucket_size",
                       zero->reduce_bucket_size(), 1);
  faults->CheckAtLeast("zero_optimization.stage3_prefetch_bucket_size",
                       zero->stage3_prefetch_bucket_size(), 0);
  faults->CheckAtLeast("zero_optimization.stage3_param_persistence_threshold",
                       zero->stage3_param_persistence_threshold(), 0);
  faults->CheckAtLeast("zero_optimization.stage3_model_persistence_threshold",
                       zero->stage3_model_persistence_threshold(), 0);
  faults->CheckAtLeast("zero_optimization.stage3_max_live_parameters",
                       zero->stage3_max_live_parameters(), 0);
  faults->CheckAtLeast("zero_optimization.stage3_max_reuse_distance",
                       zero->stage3_max_reuse_distance(), 0);
  const proto::LeafModule& leaf = zero->leaf_module();
  faults->CheckNoneEmpty("zero_optimization.leaf_module.classes",
                         leaf.classes());
  faults->CheckNoneEmpty("zero_optimization.leaf_module.names", leaf.names());
  faults->CheckNoneEmpty("zero_optimization.leaf_module.name_suffixes",
                         leaf.name_suffixes());
}

}  // namespace

void ResolveSharding(int world_size, proto::Config* config, Faults* faults) {
  ResolveZero(config->mutable_zero_optimization(), faults);
  proto::Sharding& sharding = *config->mutable_sharding();
  FillDefaults(&sharding);
  faults->CheckNoneEmpty("sharding.unit_classes", sharding.unit_classes());
  faults->CheckAtLeast("sharding.max_unit_numel", sharding.max_unit_numel(), 1);
  faults->CheckNoneEmpty("sharding.ignored_parameters",
                         sharding.ignored_parameters());
  const int32_t group = sharding.reshard_group_size();
  if (sharding.has_reshard_group_size() &&
      (group < 2 || world_size % group != 0)) {
    faults->Add("sharding.reshard_group_size",
                "expected the ranks of a group, at least 2 and a divisor of "
                "the world size ",
                world_size, ", got ", group);
  }
  faults->CheckOneOf("sharding.accumulation", sharding.accumulation(),
                     {"each", "local"});
  faults->CheckOneOf("sharding.gradient_reduction",
                     sharding.gradient_reduction(), {"mean", "sum"});
  faults->CheckOneOf("sharding.shared_working_copy",
                     sharding.shared_working_copy(), {"auto", "on", "off"});
  faults->CheckOneOf("sharding.served_gathers", sharding.served_gathers(),
                     {"auto", "on", "off"});
  if (sharding.served_gathers() == "on" && sharding.has_reshard_group_size()) {
    faults->Add("sharding.served_gathers",
                "expected auto or off, since sharding.reshard_after_forward is "
                "a number, got 'on'");
  }
  faults->CheckAtLeast("sharding.memory_limit_bytes",
                       sharding.memory_limit_bytes(), 0);
}

}  // namespace tessera
