// How an engine takes a module over.
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"
#include "base/torch/tensor_memory.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "engine/engine_impl.h"
#include "engine/parts/catch_announced.h"
#include "engine/parts/group_choice.h"
#include "engine/parts/rate_settings.h"
#include "engine/setup/initial_sync.h"
#include "engine/training/held_report.h"
#include "optim/kernels/element_step.h"
#include "sharding/construct/construction.h"
#include "sharding/dispatch/saved_tensors.h"
#include "sharding/dispatch/tag.h"
#include "sharding/flat/registry.h"
#include "sharding/partition/module_walk.h"
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

// Of which kind of device each is, too: steps have other collectives on others.
std::string ListOf(absl::Span<const FlatPlan> flats) {
  std::string list;
  for (const FlatPlan& flat : flats) {
    const at::Device device = flat.parameters[0].tensor.device();
    absl::StrAppend(&list, flat.name, device.is_cpu() ? "" : " on ",
                    device.is_cpu() ? "" : at::DeviceTypeName(device.type()),
                    "; ");
  }
  return list;
}

// Gradients of float16 below 6e-8 are 0 without a scale of the loss, and train
// nothing.
void WarnOfUnscaledHalf(const EngineParts& parts) {
  if (parts.optimizer == nullptr || parts.scaler.has_value()) return;
  int64_t count = 0;
  const std::string* first = nullptr;
  for (const auto& flat : parts.flats) {
    if (!flat->trainable() || flat->dtype() != at::kHalf) continue;
    for (const auto& p : flat->parameters()) {
      if (count++ == 0) first = &p.name;
    }
  }
  if (first == nullptr) return;
  TESSERA_LOG_RANK0(WARNING)
      << "parameter '" << *first << "'"
      << (count > 1 ? absl::StrCat(" and ", count - 1, " more are") : " is")
      << " float16, and fp16 is not enabled: the loss is not scaled, so small "
         "gradients become 0; set \"fp16\": {\"enabled\": true}, which scales "
         "it, or \"bf16\", or train a float32 module";
}

}  // namespace

absl::StatusOr<Partition> Engine::Impl::Plan(const EngineOptions& options) {
  TESSERA_RETURN_IF_ERROR(CheckTagFallback());
  TESSERA_ASSIGN_OR_RETURN(
      Partition partition,
      PlanUnits(*parts_->module, parts_->settings.partition));
  if (partition.units.empty()) {
    return absl::InvalidArgumentError(
        "the module has no parameters: register its layers with "
        "register_module in its constructor");
  }
  TESSERA_RETURN_IF_ERROR(CheckNotOwned(partition));
  if (!parts_->settings.optimizer.has_value()) return partition;
  TESSERA_ASSIGN_OR_RETURN(
      GroupChoice choice,
      ChooseGroups(parts_->config.optimizer(), options.param_groups,
                   *parts_->settings.optimizer, parts_->settings.muon,
                   *parts_->module, partition.units));
  for (const UnitPlan& unit : partition.units) {
    for (const NamedParameter& p : unit.parameters) {
      const int group = choice.groups.of[static_cast<size_t>(p.index)];
      if (!choice.frozen[static_cast<size_t>(group)]) continue;
      parts_->SetRequiresGrad(p.tensor, false);
    }
  }
  groups_chosen_ = Describe(choice);
  parts_->settings.step.adaptive_clipping =
      AdaptiveClippingOf(choice, parts_->config.adaptive_gradient_clipping());
  parts_->groups = std::move(choice.groups);
  parts_->settings.step.group_max_norms = std::move(choice.max_norms);
  for (OptimizerOptions& group : parts_->groups.options) {
    group.lr *= RateFactorOf(parts_->config);
  }
  parts_->configured_options = parts_->groups.options;
  return partition;
}

// The same module on all ranks. Returns, by number of the parameter, whether
// some rank requires its gradient. COLLECTIVE.
absl::StatusOr<std::vector<bool>> Engine::Impl::AgreeOnModule(
    const Partition& partition, const EngineOptions& options) {
  absl::Status given_back;
  std::vector<NamedParameter> ignored;  // that are to be equal
  for (const NamedParameter& p : partition.ignored) {
    given_back.Update(
        CatchTorch(p.name, [&] { return GiveBackEvictable(p.tensor); }));
    // Another engine's are its own to compare, and may be freed.
    if (options.buffers_may_differ || Registry::Global().Find(p.tensor)) {
      continue;
    }
    ignored.push_back(p);
  }
  TESSERA_RETURN_IF_ERROR(parts_->comm->AgreeOk(given_back, "Engine::Create"));
  if (options.sync_from_rank0) {
    TESSERA_RETURN_IF_ERROR(
        CheckEqual(partition.units, parts_->comm.get(), /*values=*/false)
            .status());
    TESSERA_RETURN_IF_ERROR(
        CheckIgnoredEqual(ignored, parts_->comm.get(), /*values=*/false));
    TESSERA_RETURN_IF_ERROR(BroadcastFromRank0(*parts_->module, partition.units,
                                               ignored, parts_->comm.get()));
  }
  TESSERA_ASSIGN_OR_RETURN(
      std::vector<bool> trainable,
      CheckEqual(partition.units, parts_->comm.get(), /*values=*/true));
  if (!options.buffers_may_differ) {
    TESSERA_RETURN_IF_ERROR(
        CheckIgnoredEqual(ignored, parts_->comm.get(), /*values=*/true));
    TESSERA_RETURN_IF_ERROR(
        CheckBuffersEqual(*parts_->module, parts_->comm.get()));
  }
  return trainable;
}

absl::Status Engine::Impl::Build(const EngineOptions& options) {
  CountTensorMemory();
  const RefusalReport refusals(parts_.get());
  absl::Status moved = MoveTo(options.device);
  if (moved.ok()) moved = MakeDeterministic();
  TESSERA_RETURN_IF_ERROR(parts_->comm->AgreeOk(moved, "Engine::Create"));
  // The user's predicates run there.
  const absl::StatusOr<Partition> partition =
      CatchTorch("units", [&] { return Plan(options); });
  TESSERA_RETURN_IF_ERROR(
      parts_->comm->AgreeOk(partition.status(), "Engine::Create"));
  TESSERA_ASSIGN_OR_RETURN(const std::vector<bool> trainable,
                           AgreeOnModule(*partition, options));
  if (parts_->settings.optimizer.has_value()) {  // the program's may differ
    TESSERA_RETURN_IF_ERROR(CheckSame(
        groups_chosen_, "list of parameter groups", parts_->comm.get()));
  }
  trainer_.NoteParameters();
  parts_->settings.flats.working_dtype =
      [settings = &parts_->settings](const NamedParameter& p) {
        return WorkingDtype(*settings, p);
      };
  if (parts_->settings.muon.has_value()) {
    parts_->settings.flats.part = PartsOf(parts_->groups);
  }
  TESSERA_RETURN_IF_ERROR(ChooseStage(partition->units, trainable));
  TESSERA_RETURN_IF_ERROR(MakeGroups());
  SetOverlap(parts_->config.zero_optimization(), parts_->stage,
             &parts_->settings);
  parts_->settings.flats.sharded_parameters = parts_->stage == 3;
  TESSERA_ASSIGN_OR_RETURN(
      std::vector<FlatPlan> flats,
      SplitFlats(partition->units, trainable, parts_->settings.flats));
  LimitLive(flats);
  parts_->schedule = std::make_shared<Schedule>(parts_->settings.schedule);
  TESSERA_RETURN_IF_ERROR(
      CheckSame(ListOf(flats), "list of units", parts_->comm.get()));
  std::vector<bool> expected;  // in the flats' order
  for (const auto& flat : flats) {
    for (const auto& p : flat.parameters) {
      expected.push_back(trainable[static_cast<size_t>(p.index)]);
    }
  }
  LimitMemory(flats[0].parameters[0].tensor.device());
  absl::Status taken =
      CatchAnnounced(parts_->comm.get(), "Engine::Create",
                     [&] { return TakeOver(std::move(flats)); });
  if (taken.ok()) {
    taken = parts_->comm->AgreeOk(ConvertBuffers(), "buffer_dtype");
  }
  if (taken.ok()) taken = MakeBufferSync();
  if (taken.ok()) {
    taken = parts_->comm->AgreeOk(MakeRecomputed(partition->units),
                                  "Engine::Create");
  }
  if (taken.ok()) taken = MakeObserver();
  if (!taken.ok()) {
    const std::string held = refusals.Text(taken);  // units are still there
    const absl::Status given = GiveBack(taken);
    return absl::Status(given.code(), absl::StrCat(given.message(), held));
  }
  if (parts_->stream != nullptr) {
    parts_->stream->SetBeforeWrite([this] { saver_.Detach(); });
  }
  InstallSavedTensorHooks();
  parts_->gradients = std::make_unique<Gradients>(parts_->flats, parts_->comm,
                                                  parts_->settings.gradients,
                                                  std::move(expected));
  trainer_.memory().Begin();
  trainer_.tracer().Begin();
  WarnOfUnscaledHalf(*parts_);
  return absl::OkStatus();
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
                                       all_options[i], parts_->shard_group,
                                       parts_->schedule);
    TESSERA_RETURN_IF_ERROR(
        parts_->comm->AgreeOk(flat.status(), "Engine::Create"));
    parts_->flats.push_back(*flat);
    const absl::Status adopted = (*flat)->Adopt();
    if (!adopted.ok()) {
      parts_->comm->Announce(adopted);
      return adopted;
    }
    const auto& params = (*flat)->parameters();
    for (size_t i = 0; i < params.size(); ++i) {
      parts_->places[params[i].name] = {
          static_cast<int>(parts_->flats.size()) - 1, static_cast<int>(i)};
    }
    if ((*flat)->can_be_freed()) freeable.push_back(flat->get());
  }
  parts_->schedule->Start(std::move(freeable));
  if (parts_->served != nullptr) parts_->served->EndUpdate();
  absl::Status mine;
  if (parts_->settings.loss_scaler.has_value()) {
    auto scaler = LossScaler::Create(*parts_->settings.loss_scaler);
    mine.Update(scaler.status());
    if (scaler.ok()) parts_->scaler = *scaler;
  }
  if (parts_->settings.optimizer.has_value()) {
    auto optimizer = ShardedOptimizer::Create(parts_->flats, parts_->groups);
    mine.Update(optimizer.status());
    if (optimizer.ok()) {
      parts_->optimizer = *std::move(optimizer);
      parts_->optimizer->early().SetBytes(parts_->settings.offload.early_bytes);
    }
  }
  return parts_->comm->AgreeOk(mine, "Engine::Create");
}

// By the flats' own slots: names and tensors of a storage are one there.
absl::Status Engine::Impl::MakeRecomputed(absl::Span<const UnitPlan> units) {
  const RecomputeChoice& choice = parts_->settings.recomputed;
  if (choice.units.empty() && !choice.is_recomputed) {
    NoteIfNoneMoves(parts_->settings.activations);
    return absl::OkStatus();
  }
  TESSERA_ASSIGN_OR_RETURN(const RecomputedModules found,
                           ChooseRecomputed(*parts_->module, units, choice));
  RecomputeOptions options = parts_->settings.recompute;
  TESSERA_ASSIGN_OR_RETURN(
      options.store,
      MakeActivationStore(parts_->settings.activations,
                          parts_->module->buffers(), parts_->device(),
                          parts_->comm->rank()));
  if (options.store == nullptr && !options.recomputes) return absl::OkStatus();
  parts_->recomputed = std::make_unique<RecomputedUnits>(std::move(options));
  for (const RecomputedModule& module : found.modules) {
    for (const at::Tensor& p : module.parameters) {
      const StorageOwner owned = Registry::Global().Find(p);
      if (!owned) continue;
      parts_->recomputed->Add(module.path, owned.flat.get(), owned.slot);
    }
  }
  for (const at::Tensor& p : found.shared) {
    const StorageOwner owned = Registry::Global().Find(p);
    if (owned) parts_->recomputed->AddShared(owned.flat.get(), owned.slot);
  }
  return absl::OkStatus();
}

absl::Status Engine::Impl::ConvertBuffers() {
  if (!parts_->settings.buffer_dtype.has_value()) return absl::OkStatus();
  return CatchTorch("buffer_dtype", [&] {
    TorchScope scope;
    for (const auto& buffer : parts_->module->named_buffers(/*recurse=*/true)) {
      const at::Tensor& t = buffer.value();
      if (!t.defined() || !c10::isFloatingType(t.scalar_type())) continue;
      if (t.scalar_type() == *parts_->settings.buffer_dtype)
        continue;  // or tied
      converted_buffers_.emplace_back(t, t.scalar_type());
      t.set_data(t.to(*parts_->settings.buffer_dtype));
    }
  });
}

// Last of all, since it tells what has become of the module.
absl::Status Engine::Impl::MakeObserver() {
  TESSERA_ASSIGN_OR_RETURN(observer_,
                           StepObserver::Create(parts_.get(), &monitor_));
  trainer_.SetObserver(observer_.get());
  return absl::OkStatus();
}

absl::Status Engine::Impl::MakeBufferSync() {
  if (!parts_->settings.buffer_sync.has_value()) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(
      parts_->buffer_sync,
      BufferSync::Create(parts_->module.get(), *parts_->settings.buffer_sync,
                         parts_->device(), parts_->comm.get()));
  return absl::OkStatus();
}

}  // namespace tessera
