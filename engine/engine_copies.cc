// Which ranks share a flat parameter's shards, and how whole values come to be:
// groups, one copy of a host's ranks, gathers that are served, tiers.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "comm/capabilities.h"
#include "comm/shared_memory.h"
#include "config/config.pb.h"
#include "engine/build/tiers.h"
#include "engine/engine_impl.h"
#include "sharding/copy/flat_description.h"

namespace tessera {
namespace {

// What all ranks of a shard group have come to is agreed on over the groups.
template <typename T>
absl::StatusOr<T> AgreedOverGroups(const ShardedModel& model,
                                   absl::StatusOr<T> mine,
                                   absl::string_view where) {
  if (model.replicas() == nullptr) return mine;
  TESSERA_RETURN_IF_ERROR(model.comm()->AgreeOk(mine.status(), where));
  return mine;
}

}  // namespace

// Null if what a forward leaves is sharded over all ranks of a shard group.
absl::StatusOr<std::shared_ptr<Communicator>> Engine::Impl::ReshardGroup() {
  const int n = config_.sharding().reshard_group_size();
  if (n == 0 || n == model_.shard()->world_size() || model_.stage() < 3) {
    return nullptr;
  }
  return AgreedOverGroups(model_,
                          model_.shard()->Split(model_.shard()->rank() / n,
                                                {"groups to reshard to"}),
                          "sharding.reshard_after_forward");
}

// One working copy for all ranks, where that is wanted and they share memory.
absl::Status Engine::Impl::ShareWorkingCopy(
    absl::Span<const FlatPlan> flats,
    std::vector<FlatParameterOptions>* options) {
  const std::string& wanted = config_.sharding().shared_working_copy();
  const bool must = wanted == "on";
  const bool debugging = settings_.schedule.max_live == 0 || PoisonsOnFree();
  if (AnyParametersElsewhere(*options)) {
    return must ? WithParametersElsewhere("sharding.shared_working_copy")
                : absl::OkStatus();
  }
  if (model_.stage() < 3 || model_.shard()->world_size() == 1 ||
      wanted == "off" || (debugging && !must)) {
    return absl::OkStatus();
  }
  constexpr int64_t kPageBytes = 4096;
  int64_t bytes = 0;
  bool on_host = true;
  for (size_t i = 0; i < flats.size(); ++i) {
    const auto& parameters = flats[i].parameters;
    on_host &= parameters[0].tensor.is_cpu();
    (*options)[i].shared_offset = bytes;
    bytes += LayoutOf(parameters, model_.shard()->world_size()).whole_numel() *
             static_cast<int64_t>(
                 c10::elementSize(WorkingDtypeOf(parameters, (*options)[i])));
    bytes = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  }
  absl::StatusOr<std::shared_ptr<SharedMemory>> memory =
      absl::UnimplementedError("parameters are not on the CPU");
  if (on_host) {
    memory = model_.shard()->ShareMemory(bytes, CommTag{"shared working copy"});
  }
  memory = AgreedOverGroups(model_, std::move(memory),
                            "sharding.shared_working_copy");
  if (!memory.ok()) {
    const bool no_way = absl::IsUnimplemented(memory.status()) ||
                        absl::IsUnavailable(memory.status());
    if (!must && no_way) return absl::OkStatus();
    return absl::Status(memory.status().code(),
                        absl::StrCat("sharding.shared_working_copy: ",
                                     memory.status().message()));
  }
  guard_->SetOneCopy();
  for (FlatParameterOptions& each : *options) {
    each.shared = *memory;
  }
  return absl::OkStatus();
}

absl::Status Engine::Impl::ServeGathers(
    absl::Span<const FlatPlan> flats,
    std::vector<FlatParameterOptions>* options) {
  const std::string& wanted = config_.sharding().served_gathers();
  // Shards of a device would be copied to the host, which would wait for them.
  const bool on_host = std::all_of(
      flats.begin(), flats.end(),
      [](const FlatPlan& flat) { return flat.parameters[0].tensor.is_cpu(); });
  const bool by_default = model_.comm()->capabilities().prefers_pulls &&
                          on_host &&
                          config_.sharding().reshard_group_size() == 0;
  if (model_.stage() < 3 || model_.shard()->world_size() == 1 ||
      wanted == "off" || (wanted == "auto" && !by_default)) {
    return absl::OkStatus();
  }
  if (AnyParametersElsewhere(*options)) {
    return wanted == "on" ? WithParametersElsewhere("sharding.served_gathers")
                          : absl::OkStatus();
  }
  auto server =
      AgreedOverGroups(model_, model_.shard()->ServeShards({"served gathers"}),
                       "sharding.served_gathers");
  if (absl::IsUnimplemented(server.status()) && wanted == "auto") {
    return absl::OkStatus();
  }
  TESSERA_RETURN_IF_ERROR(server.status());
  guard_->SetServed(std::make_shared<ServedGathers>(*std::move(server)));
  for (size_t i = 0; i < options->size(); ++i) {
    if (!(*options)[i].stage.sharded_parameters) continue;
    (*options)[i].served = guard_->served();
    (*options)[i].served_key = static_cast<int64_t>(i);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<FlatParameterOptions>>
Engine::Impl::FlatParameterOptionsOfAll(absl::Span<const FlatPlan> flats) {
  std::vector<FlatParameterOptions> options;
  for (const auto& flat : flats) {
    options.push_back(FlatParameterOptionsOf(settings_, flat, model_.stage()));
    options.back().replicas = model_.replicas();
    options.back().stages = model_.mesh().size(kPp);
  }
  TESSERA_ASSIGN_OR_RETURN(auto stream, PutInTiers(settings_.offload, flats,
                                                   model_.shard()->world_size(),
                                                   model_.comm(), &options));
  guard_->SetStream(std::move(stream));
  TESSERA_RETURN_IF_ERROR(ShareWorkingCopy(flats, &options));
  if (guard_->one_copy()) return options;
  TESSERA_RETURN_IF_ERROR(ServeGathers(flats, &options));
  if (guard_->served() != nullptr) return options;
  TESSERA_ASSIGN_OR_RETURN(const auto group, ReshardGroup());
  for (FlatParameterOptions& each : options) {
    if (each.stage.sharded_parameters) each.reshard_group = group;
  }
  return options;
}

}  // namespace tessera
