// Which ranks share a flat parameter's shards, and how whole values come to be:
// groups, one copy of a host's ranks, gathers that are served, tiers.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "engine/engine_impl.h"
#include "engine/setup/tiers.h"
#include "sharding/copy/flat_description.h"

namespace tessera {

// Neighbours shard; where nothing is sharded all ranks are one group.
absl::Status Engine::Impl::MakeGroups() {
  const int n = parts_->settings.shard_group_size;
  parts_->shard_group = parts_->comm;
  if (parts_->stage == 0 || n == parts_->comm->world_size()) {
    return absl::OkStatus();
  }
  TESSERA_ASSIGN_OR_RETURN(
      parts_->shard_group,
      parts_->comm->Split(parts_->comm->rank() / n, CommTag{"shard groups"}));
  TESSERA_ASSIGN_OR_RETURN(
      parts_->replicas,
      parts_->comm->Split(parts_->comm->rank() % n, CommTag{"replicas"}));
  return absl::OkStatus();
}

// What all ranks of a shard group have come to is agreed on over the groups.
absl::Status Engine::Impl::AgreeOverGroups(const absl::Status& mine,
                                           absl::string_view where) {
  return parts_->replicas == nullptr ? mine
                                     : parts_->comm->AgreeOk(mine, where);
}

// Null if what a forward leaves is sharded over all ranks of a shard group.
absl::StatusOr<std::shared_ptr<Communicator>> Engine::Impl::ReshardGroup() {
  const int n = parts_->settings.reshard_group_size;
  if (n == 0 || n == parts_->shard_group->world_size() || parts_->stage < 3) {
    return nullptr;
  }
  auto group = parts_->shard_group->Split(parts_->shard_group->rank() / n,
                                          CommTag{"groups to reshard to"});
  TESSERA_RETURN_IF_ERROR(
      AgreeOverGroups(group.status(), "sharding.reshard_after_forward"));
  return group;
}

// One working copy for all ranks, where that is wanted and they share memory.
absl::Status Engine::Impl::ShareWorkingCopy(
    absl::Span<const FlatPlan> flats,
    std::vector<FlatParameterOptions>* options) {
  const bool must = parts_->settings.shared_working_copy == "on";
  const bool debugging =
      parts_->settings.schedule.max_live == 0 || PoisonsOnFree();
  if (AnyParametersElsewhere(*options)) {
    return must ? WithParametersElsewhere("sharding.shared_working_copy")
                : absl::OkStatus();
  }
  if (parts_->stage < 3 || parts_->shard_group->world_size() == 1 ||
      parts_->settings.shared_working_copy == "off" || (debugging && !must)) {
    return absl::OkStatus();
  }
  constexpr int64_t kPageBytes = 4096;
  int64_t bytes = 0;
  bool on_host = true;
  for (size_t i = 0; i < flats.size(); ++i) {
    const auto& parameters = flats[i].parameters;
    on_host &= parameters[0].tensor.is_cpu();
    (*options)[i].shared_offset = bytes;
    bytes +=
        LayoutOf(parameters, parts_->shard_group->world_size()).whole_numel() *
        static_cast<int64_t>(
            c10::elementSize(WorkingDtypeOf(parameters, (*options)[i])));
    bytes = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  }
  absl::StatusOr<std::shared_ptr<SharedMemory>> memory =
      absl::UnimplementedError("parameters are not on the CPU");
  if (on_host) {
    memory =
        parts_->shard_group->ShareMemory(bytes, CommTag{"shared working copy"});
  }
  const absl::Status agreed =
      AgreeOverGroups(memory.status(), "sharding.shared_working_copy");
  if (!agreed.ok()) memory = agreed;
  if (!memory.ok()) {
    const bool no_way = absl::IsUnimplemented(memory.status()) ||
                        absl::IsUnavailable(memory.status());
    if (!must && no_way) return absl::OkStatus();
    return absl::Status(memory.status().code(),
                        absl::StrCat("sharding.shared_working_copy: ",
                                     memory.status().message()));
  }
  parts_->shares_working_copy = true;
  for (FlatParameterOptions& each : *options) {
    each.shared = *memory;
  }
  return absl::OkStatus();
}

absl::Status Engine::Impl::ServeGathers(
    absl::Span<const FlatPlan> flats,
    std::vector<FlatParameterOptions>* options) {
  const std::string& wanted = parts_->settings.served_gathers;
  // Shards of a device would be copied to the host, which would wait for them.
  const bool on_host = std::all_of(
      flats.begin(), flats.end(),
      [](const FlatPlan& flat) { return flat.parameters[0].tensor.is_cpu(); });
  const bool by_default = parts_->comm->capabilities().prefers_pulls &&
                          on_host && parts_->settings.reshard_group_size == 0;
  if (parts_->stage < 3 || parts_->shard_group->world_size() == 1 ||
      wanted == "off" || (wanted == "auto" && !by_default)) {
    return absl::OkStatus();
  }
  if (AnyParametersElsewhere(*options)) {
    return wanted == "on" ? WithParametersElsewhere("sharding.served_gathers")
                          : absl::OkStatus();
  }
  auto server = parts_->shard_group->ServeShards(CommTag{"served gathers"});
  const absl::Status agreed =
      AgreeOverGroups(server.status(), "sharding.served_gathers");
  if (!agreed.ok()) server = agreed;
  if (absl::IsUnimplemented(server.status()) && wanted == "auto") {
    return absl::OkStatus();
  }
  TESSERA_RETURN_IF_ERROR(server.status());
  parts_->served = std::make_shared<ServedGathers>(*std::move(server));
  for (size_t i = 0; i < options->size(); ++i) {
    if (!(*options)[i].stage.sharded_parameters) continue;
    (*options)[i].served = parts_->served;
    (*options)[i].served_key = static_cast<int64_t>(i);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<FlatParameterOptions>>
Engine::Impl::FlatParameterOptionsOfAll(absl::Span<const FlatPlan> flats) {
  std::vector<FlatParameterOptions> options;
  for (const auto& flat : flats) {
    options.push_back(
        FlatParameterOptionsOf(parts_->settings, flat, parts_->stage));
    options.back().replicas = parts_->replicas;
  }
  TESSERA_ASSIGN_OR_RETURN(parts_->stream,
                           PutInTiers(parts_->settings.offload, flats,
                                      parts_->shard_group->world_size(),
                                      parts_->comm.get(), &options));
  TESSERA_RETURN_IF_ERROR(ShareWorkingCopy(flats, &options));
  if (parts_->shares_working_copy) return options;
  TESSERA_RETURN_IF_ERROR(ServeGathers(flats, &options));
  if (parts_->served != nullptr) return options;
  TESSERA_ASSIGN_OR_RETURN(const auto group, ReshardGroup());
  for (FlatParameterOptions& each : options) {
    if (each.stage.sharded_parameters) each.reshard_group = group;
  }
  return options;
}

}  // namespace tessera
