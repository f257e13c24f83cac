// How an engine takes a module over, and gives it back.
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "engine/engine_impl.h"
#include "engine/setup/initial_sync.h"
#include "sharding/construct/construction.h"
#include "sharding/dispatch/saved_tensors.h"
#include "sharding/dispatch/tag.h"
#include "sharding/flat/registry.h"
#include "sharding/layout/module_walk.h"
#include "sharding/torch/torch_scope.h"
#include "torch/nn/module.h"

namespace tessera {
namespace {

absl::Status CheckNotOwned(const Partition& partition) {
  for (const auto& unit : partition.units) {
    for (const auto& p : unit.parameters) {
      if (!Registry::Global().Find(p.tensor)) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          "parameter '", p.name,
          "' belongs to another tessera::Engine; Close() that one first"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Partition> Engine::Impl::Plan() {
  TESSERA_RETURN_IF_ERROR(CheckTagFallback());
  TESSERA_ASSIGN_OR_RETURN(Partition partition,
                           PlanUnits(*module_, settings_.partition));
  if (partition.units.empty()) {
    return absl::InvalidArgumentError("the module has no parameters");
  }
  TESSERA_RETURN_IF_ERROR(CheckNotOwned(partition));
  return partition;
}

absl::Status Engine::Impl::MoveTo(std::optional<at::Device> device) {
  for (const at::Tensor& p : module_->parameters()) {
    constructed_ |= IsEvictable(p);
    TESSERA_RETURN_IF_ERROR(CheckGroupOfEvictable(p, *comm_));
  }
  if (!device.has_value()) return absl::OkStatus();
  if (constructed_ && !device->is_cpu()) {
    return absl::UnimplementedError(absl::StrCat(
        "EngineOptions::device is ", device->str(),
        ", and ConstructSharded made the module, on the CPU, where it stays"));
  }
  if (constructed_) return absl::OkStatus();
  return CatchTorch("EngineOptions::device", [&] { module_->to(*device); });
}

absl::Status Engine::Impl::Build(const EngineOptions& options) {
  TESSERA_RETURN_IF_ERROR(
      CheckSame(config_.ShortDebugString(), "configuration", comm_.get()));
  TESSERA_RETURN_IF_ERROR(
      comm_->AgreeOk(MoveTo(options.device), "Engine::Create"));
  absl::StatusOr<Partition> partition = Plan();
  TESSERA_RETURN_IF_ERROR(comm_->AgreeOk(partition.status(), "Engine::Create"));
  for (const NamedParameter& p : partition->ignored) {
    TESSERA_RETURN_IF_ERROR(comm_->AgreeOk(
        CatchTorch(p.name, [&] { return GiveBackEvictable(p.tensor); }),
        "Engine::Create"));
  }
  if (options.sync_from_rank0) {
    TESSERA_RETURN_IF_ERROR(
        CheckEqual(partition->units, comm_.get(), /*values=*/false).status());
    TESSERA_RETURN_IF_ERROR(
        BroadcastFromRank0(*module_, partition->units, comm_.get()));
  }
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<bool> trainable,
      CheckEqual(partition->units, comm_.get(), /*values=*/true));
  if (!options.buffers_may_differ) {
    TESSERA_RETURN_IF_ERROR(CheckBuffersEqual(*module_, comm_.get()));
  }
  for (const at::Tensor& p : module_->parameters()) {
    known_parameters_.insert(p.unsafeGetTensorImpl());
  }
  parameters_fingerprint_ = FingerprintOfParameters(*module_);
  settings_.flats.working_dtype = [this](const NamedParameter& p) {
    return WorkingDtype(settings_, p);
  };
  // Which parameters persist does not hang on the stage, and the stage hangs on
  // the flats.
  settings_.flats.sharded_parameters = true;
  TESSERA_ASSIGN_OR_RETURN(
      std::vector<FlatPlan> flats,
      SplitFlats(partition->units, trainable, settings_.flats));
  TESSERA_RETURN_IF_ERROR(ChooseStage(flats));
  TESSERA_RETURN_IF_ERROR(MakeGroups());
  SetOverlap(config_.zero_optimization(), stage_, &settings_);
  schedule_ = std::make_shared<Schedule>(settings_.schedule);
  if (stage_ < 3) {
    settings_.flats.sharded_parameters = false;
    TESSERA_ASSIGN_OR_RETURN(
        flats, SplitFlats(partition->units, trainable, settings_.flats));
  }
  std::string names;
  for (const auto& flat : flats) absl::StrAppend(&names, flat.name, "; ");
  TESSERA_RETURN_IF_ERROR(CheckSame(names, "list of units", comm_.get()));
  std::vector<bool> expected;  // in the flats' order
  for (const auto& flat : flats) {
    for (const auto& p : flat.parameters) {
      expected.push_back(trainable[static_cast<size_t>(p.index)]);
    }
  }
  absl::Status taken = TakeOver(std::move(flats));
  if (taken.ok()) taken = comm_->AgreeOk(ConvertBuffers(), "buffer_dtype");
  if (taken.ok()) taken = MakeBufferSync();
  if (!taken.ok()) return GiveBack(taken);
  InstallSavedTensorHooks();
  gradients_ = std::make_unique<Gradients>(flats_, comm_, settings_.gradients,
                                           std::move(expected));
  return absl::OkStatus();
}

// One working copy for all ranks, where that is wanted and they share memory.
absl::Status Engine::Impl::ShareWorkingCopy(
    absl::Span<const FlatPlan> flats,
    std::vector<FlatParameterOptions>* options) {
  const bool must = settings_.shared_working_copy == "on";
  const bool debugging = settings_.schedule.max_live == 0 || PoisonsOnFree();
  if (stage_ < 3 || shard_group_->world_size() == 1 ||
      settings_.shared_working_copy == "off" || (debugging && !must)) {
    return absl::OkStatus();
  }
  constexpr int64_t kPageBytes = 4096;
  int64_t bytes = 0;
  bool on_host = true;
  for (size_t i = 0; i < flats.size(); ++i) {
    const auto& parameters = flats[i].parameters;
    on_host &= parameters[0].tensor.is_cpu();
    (*options)[i].shared_offset = bytes;
    bytes += LayoutOf(parameters, shard_group_->world_size()).whole_numel() *
             static_cast<int64_t>(
                 c10::elementSize(WorkingDtypeOf(parameters, (*options)[i])));
    bytes = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  }
  absl::StatusOr<std::shared_ptr<SharedMemory>> memory =
      absl::UnimplementedError("parameters are not on the CPU");
  if (on_host) {
    memory = shard_group_->ShareMemory(bytes, CommTag{"shared working copy"});
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
  shares_working_copy_ = true;
  for (FlatParameterOptions& each : *options) {
    each.shared = *memory;
  }
  return absl::OkStatus();
}

absl::Status Engine::Impl::ServeGathers(
    std::vector<FlatParameterOptions>* options) {
  const std::string& wanted = settings_.served_gathers;
  const bool by_default =
      comm_->backend() == "gloo" && settings_.reshard_group_size == 0;
  if (stage_ < 3 || shard_group_->world_size() == 1 || wanted == "off" ||
      (wanted == "auto" && !by_default)) {
    return absl::OkStatus();
  }
  auto server = shard_group_->ServeShards(CommTag{"served gathers"});
  const absl::Status agreed =
      AgreeOverGroups(server.status(), "sharding.served_gathers");
  if (!agreed.ok()) server = agreed;
  if (absl::IsUnimplemented(server.status()) && wanted == "auto") {
    return absl::OkStatus();
  }
  TESSERA_RETURN_IF_ERROR(server.status());
  served_ = std::make_shared<ServedGathers>(*std::move(server));
  for (size_t i = 0; i < options->size(); ++i) {
    if (!(*options)[i].stage.sharded_parameters) continue;
    (*options)[i].served = served_;
    (*options)[i].served_key = static_cast<int64_t>(i);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<FlatParameterOptions>>
Engine::Impl::FlatParameterOptionsOfAll(absl::Span<const FlatPlan> flats) {
  std::vector<FlatParameterOptions> options;
  for (const auto& flat : flats) {
    options.push_back(FlatParameterOptionsOf(settings_, flat, stage_));
    options.back().replicas = replicas_;
  }
  TESSERA_RETURN_IF_ERROR(ShareWorkingCopy(flats, &options));
  if (shares_working_copy_) return options;
  TESSERA_RETURN_IF_ERROR(ServeGathers(&options));
  if (served_ != nullptr) return options;
  TESSERA_ASSIGN_OR_RETURN(const auto group, ReshardGroup());
  for (FlatParameterOptions& each : options) {
    if (each.stage.sharded_parameters) each.reshard_group = group;
  }
  return options;
}

// One flat after another on all ranks, so that all know what has been taken
// over.
absl::Status Engine::Impl::TakeOver(std::vector<FlatPlan> flats) {
  TESSERA_ASSIGN_OR_RETURN(const auto all_options,
                           FlatParameterOptionsOfAll(flats));
  std::vector<Gatherable*> freeable;
  for (size_t i = 0; i < flats.size(); ++i) {
    FlatPlan& plan = flats[i];
    auto flat = FlatParameter::Prepare(plan.name, std::move(plan.parameters),
                                       all_options[i], shard_group_, schedule_);
    TESSERA_RETURN_IF_ERROR(comm_->AgreeOk(flat.status(), "Engine::Create"));
    flats_.push_back(*flat);
    const absl::Status adopted = (*flat)->Adopt();
    if (!adopted.ok()) {
      comm_->Announce(adopted);
      return adopted;
    }
    const auto& params = (*flat)->parameters();
    for (size_t i = 0; i < params.size(); ++i) {
      places_[params[i].name] = {static_cast<int>(flats_.size()) - 1,
                                 static_cast<int>(i)};
    }
    if ((*flat)->can_be_freed()) freeable.push_back(flat->get());
  }
  schedule_->Start(std::move(freeable));
  if (served_ != nullptr) served_->EndUpdate();
  absl::Status mine;
  if (settings_.loss_scaler.has_value()) {
    auto scaler = LossScaler::Create(*settings_.loss_scaler);
    mine.Update(scaler.status());
    if (scaler.ok()) scaler_ = *scaler;
  }
  if (settings_.adamw.has_value()) {
    auto optimizer = AdamW::Create(flats_, *settings_.adamw);
    mine.Update(optimizer.status());
    if (optimizer.ok()) optimizer_ = *std::move(optimizer);
  }
  return comm_->AgreeOk(mine, "Engine::Create");
}

absl::Status Engine::Impl::ConvertBuffers() {
  if (!settings_.buffer_dtype.has_value()) return absl::OkStatus();
  return CatchTorch("buffer_dtype", [&] {
    TorchScope scope;
    for (const auto& buffer : module_->named_buffers(/*recurse=*/true)) {
      const at::Tensor& t = buffer.value();
      if (!t.defined() || !c10::isFloatingType(t.scalar_type())) continue;
      if (t.scalar_type() == *settings_.buffer_dtype) continue;  // or tied
      converted_buffers_.emplace_back(t, t.scalar_type());
      t.set_data(t.to(*settings_.buffer_dtype));
    }
  });
}

absl::Status Engine::Impl::MakeBufferSync() {
  if (!settings_.buffer_sync.has_value()) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(
      buffer_sync_, BufferSync::Create(module_.get(), *settings_.buffer_sync,
                                       device(), comm_.get()));
  return absl::OkStatus();
}

void Engine::Impl::GiveBuffersBack() {
  TorchScope scope;
  for (const auto& [buffer, dtype] : converted_buffers_) {
    buffer.set_data(buffer.to(dtype));
  }
  converted_buffers_.clear();
}

// The module is again what it was before Create; one that ConstructSharded made
// was never whole, and cannot be.
absl::Status Engine::Impl::GiveBack(const absl::Status& why) {
  if (constructed_) {
    return absl::Status(
        why.code(), absl::StrCat(why.message(),
                                 "; the module, which ConstructSharded made, "
                                 "is lost: construct it again"));
  }
  // What is asked for here is what the module held before.
  MemoryLedger& ledger = MemoryLedger::Global();
  const int64_t limit = ledger.limit_bytes();
  ledger.SetLimit(MemoryLedger::kNoLimit);
  absl::Status given = Close();
  ledger.SetLimit(limit);
  if (given.ok()) return why;
  return absl::Status(
      why.code(),
      absl::StrCat(why.message(), "; and the module's parameters could not be ",
                   "given back: ", given.message()));
}

absl::Status Engine::Impl::Close() {
  TESSERA_RETURN_IF_ERROR(CheckOpen());
  TESSERA_RETURN_IF_ERROR(AgreeOnUpdate(absl::OkStatus(), "Engine::Close"));
  absl::Status status;
  for (const auto& flat : flats_) {
    status = CatchTorch("Close", [&] { return flat->Release(); });
    if (!status.ok()) {  // to be tried again
      comm_->Announce(status);
      return status;
    }
  }
  TESSERA_RETURN_IF_ERROR(CatchTorch("Close", [&] { GiveBuffersBack(); }));
  if (served_ != nullptr) served_->End();
  gradients_.reset();
  optimizer_.reset();
  flats_.clear();
  closed_ = true;
  return absl::OkStatus();
}

}  // namespace tessera
