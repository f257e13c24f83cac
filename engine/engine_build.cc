// How an engine takes a module over.
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"
#include "base/torch/tensor_memory.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "comm/catch_announced.h"
#include "config/config.h"
#include "engine/build/group_choice.h"
#include "engine/build/initial_sync.h"
#include "engine/build/rate_settings.h"
#include "engine/engine_impl.h"
#include "engine/train/held_report.h"
#include "optim/kernels/element_step.h"
#include "optim/step_decision.h"
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

// Lists the flats with their kind of device: a step's collectives depend on it.
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

// Checks what the configuration does not say: a program's groups, and the
// micro-batches that a plan has chosen.
absl::Status CheckStepInBackward(const proto::Config& config,
                                 const Settings& settings) {
  if (!settings.gradients.uses_up) return absl::OkStatus();
  const bool clips = !settings.step.group_max_norms.empty() ||
                     !settings.step.adaptive_clipping.empty();
  const int64_t steps = config.gradient_accumulation_steps();
  if (!clips && steps == 1) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "sharding.step_in_backward: expected false, got true: ",
      clips ? "a group of parameters has a gradient_clipping or "
              "adaptive_gradient_clipping of its own"
            : absl::StrCat("gradient_accumulation_steps auto is ", steps),
      ", and its step is not known before all gradients are there"));
}

// Gradients of float16 below 6e-8 are 0 without a scale of the loss, and train
// nothing.
void WarnOfUnscaledHalf(const ShardedModel& model,
                        const Optimization& optimization) {
  if (optimization.optimizer() == nullptr || optimization.scaler() != nullptr) {
    return;
  }
  int64_t count = 0;
  const std::string* first = nullptr;
  for (const auto& flat : model.flats()) {
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
  TESSERA_ASSIGN_OR_RETURN(Partition partition,
                           PlanUnits(model_.module(), settings_.partition));
  if (partition.units.empty()) {
    return absl::InvalidArgumentError(
        "the module has no parameters: register its layers with "
        "register_module in its constructor");
  }
  TESSERA_RETURN_IF_ERROR(CheckNotOwned(partition));
  if (!settings_.optimizer.has_value()) return partition;
  TESSERA_ASSIGN_OR_RETURN(
      GroupChoice choice,
      ChooseGroups(config_.optimizer(), options.param_groups,
                   *settings_.optimizer, settings_.muon, model_.module(),
                   partition.units));
  for (const UnitPlan& unit : partition.units) {
    for (const NamedParameter& p : unit.parameters) {
      const int group = choice.groups.of[static_cast<size_t>(p.index)];
      if (!choice.frozen[static_cast<size_t>(group)]) continue;
      groups_.SetRequiresGrad(p.tensor, false);
    }
  }
  groups_chosen_ = Describe(choice);
  settings_.step.adaptive_clipping =
      AdaptiveClippingOf(choice, config_.adaptive_gradient_clipping());
  settings_.step.group_max_norms = std::move(choice.max_norms);
  if (!settings_.step.group_max_norms.empty() ||
      !settings_.step.adaptive_clipping.empty()) {
    settings_.narrow_gradients = false;  // they are changed
  }
  TESSERA_RETURN_IF_ERROR(CheckStepInBackward(config_, settings_));
  for (OptimizerOptions& group : choice.groups.options) {
    group.lr *= RateFactorOf(config_);
  }
  groups_.Configure(std::move(choice.groups));
  return partition;
}

// Checks that all ranks have the same module. Returns, by number of the
// parameter, whether some rank requires its gradient. COLLECTIVE.
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
  TESSERA_RETURN_IF_ERROR(model_.comm()->AgreeOk(given_back, "Engine::Create"));
  if (options.sync_from_rank0) {
    TESSERA_RETURN_IF_ERROR(
        CheckEqual(partition.units, model_.comm(), /*values=*/false).status());
    TESSERA_RETURN_IF_ERROR(
        CheckIgnoredEqual(ignored, model_.comm(), /*values=*/false));
    TESSERA_RETURN_IF_ERROR(BroadcastFromRank0(model_.module(), partition.units,
                                               ignored, model_.comm()));
  }
  TESSERA_ASSIGN_OR_RETURN(
      std::vector<bool> trainable,
      CheckEqual(partition.units, model_.comm(), /*values=*/true));
  if (!options.buffers_may_differ) {
    TESSERA_RETURN_IF_ERROR(
        CheckIgnoredEqual(ignored, model_.comm(), /*values=*/true));
    TESSERA_RETURN_IF_ERROR(CheckBuffersEqual(model_.module(), model_.comm()));
  }
  return trainable;
}

absl::Status Engine::Impl::Build(const EngineOptions& options) {
  CountTensorMemory();
  const RefusalReport refusals(&model_, &optimization_, plan_.get());
  absl::Status moved = MoveTo(options.device);
  if (moved.ok()) {
    moved = process_.MakeDeterministic(model_.module(), settings_.determinism);
  }
  TESSERA_RETURN_IF_ERROR(model_.comm()->AgreeOk(moved, "Engine::Create"));
  // The user's predicates run there.
  absl::StatusOr<Partition> partition =
      CatchTorch("units", [&] { return Plan(options); });
  TESSERA_RETURN_IF_ERROR(
      model_.comm()->AgreeOk(partition.status(), "Engine::Create"));
  TESSERA_ASSIGN_OR_RETURN(const std::vector<bool> trainable,
                           AgreeOnModule(*partition, options));
  if (settings_.optimizer.has_value()) {  // the program's may differ
    TESSERA_RETURN_IF_ERROR(
        CheckSame(groups_chosen_, "list of parameter groups", model_.comm()));
  }
  trainer_.NoteParameters();
  settings_.flats.working_dtype = [settings =
                                       &settings_](const NamedParameter& p) {
    return WorkingDtype(*settings, p);
  };
  if (settings_.muon.has_value()) {
    settings_.flats.part = PartsOf(groups_.groups());
  }
  TESSERA_RETURN_IF_ERROR(model_.MakeMesh(PipelineRanksOf(config_),
                                          SequenceRanksOf(config_),
                                          TensorRanksOf(config_)));
  TESSERA_RETURN_IF_ERROR(DivideLayers(options, &partition->units));
  TESSERA_RETURN_IF_ERROR(DivideSequences(&partition->units));
  TESSERA_RETURN_IF_ERROR(MakeStages(options, &partition->units));
  absl::StatusOr<std::vector<FlatPlan>> laid_out =
      LayOut(partition->units, trainable);
  if (!laid_out.ok()) {
    (void)model_.comm()->AgreeOk(laid_out.status(), "Engine::Create");
    absl::Status whole = parts_.GiveBack();
    whole.Update(stages_.GiveBack());
    return whole.ok() ? laid_out.status()
                      : NotGivenBack(laid_out.status(), whole);
  }
  std::vector<FlatPlan>& flats = *laid_out;
  std::vector<bool> expected;  // in the flats' order
  for (const auto& flat : flats) {
    for (const auto& p : flat.parameters) {
      expected.push_back(trainable[static_cast<size_t>(p.index)]);
    }
  }
  process_.LimitMemory(flats[0].parameters[0].tensor.device(),
                       config_.sharding().memory_limit_bytes(), model_.stage());
  absl::Status taken = CatchAnnounced(model_.comm(), "Engine::Create", [&] {
    return TakeOver(std::move(flats));
  });
  if (taken.ok()) {
    parts_.RenewDtypes();
    taken = model_.comm()->AgreeOk(
        buffers_.Convert(model_.module(), settings_.buffer_dtype),
        "buffer_dtype");
  }
  if (taken.ok()) taken = MakeBufferSync();
  if (taken.ok()) taken = MakePipeline();
  if (taken.ok()) {
    taken = model_.comm()->AgreeOk(MakeRecomputed(partition->units),
                                   "Engine::Create");
  }
  if (taken.ok()) taken = MakeObserver(options);
  if (!taken.ok()) {
    const std::string held = refusals.Text(taken);  // units are still there
    const absl::Status given = GiveBack(taken);
    return absl::Status(given.code(), absl::StrCat(given.message(), held));
  }
  if (guard_->stream() != nullptr) {
    guard_->stream()->SetBeforeWrite([this] { saver_.Detach(); });
  }
  InstallSavedTensorHooks();
  if (model_.has_cuts() || model_.has_sequences()) {
    settings_.gradients.together = model_.mesh().job();
  }
  optimization_.SetGradients(
      std::make_unique<Gradients>(model_.flats(), model_.summing(),
                                  settings_.gradients, std::move(expected)));
  if (optimization_.optimizer() != nullptr) {
    MeasureBeforeLeaving(model_.flats(), settings_.step,
                         *optimization_.optimizer(), optimization_.gradients());
  }
  trainer_.Begin();
  WarnOfUnscaledHalf(model_, optimization_);
  return absl::OkStatus();
}

// Chooses the stage, the groups of ranks and the flats.
absl::StatusOr<std::vector<FlatPlan>> Engine::Impl::LayOut(
    absl::Span<const UnitPlan> units, const std::vector<bool>& trainable) {
  TESSERA_RETURN_IF_ERROR(ChooseStage(units, trainable));
  TESSERA_RETURN_IF_ERROR(
      model_.MakeShardGroups(settings_.group_size(model_.stage())));
  SetOverlap(config_.zero_optimization(), model_.stage(), &settings_);
  settings_.flats.sharded_parameters = model_.stage() == 3;
  TESSERA_ASSIGN_OR_RETURN(std::vector<FlatPlan> flats,
                           SplitFlats(units, trainable, settings_.flats));
  LimitLive(flats);
  model_.SetSchedule(std::make_shared<Schedule>(settings_.schedule));
  TESSERA_RETURN_IF_ERROR(
      CheckSame(ListOf(flats), "list of units", model_.comm()));
  return flats;
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
                                       all_options[i], model_.shard(),
                                       model_.schedule());
    TESSERA_RETURN_IF_ERROR(
        model_.comm()->AgreeOk(flat.status(), "Engine::Create"));
    model_.Add(*flat);
    const absl::Status adopted = (*flat)->Adopt();
    if (!adopted.ok()) {
      model_.comm()->Announce(adopted);
      return adopted;
    }
    if ((*flat)->can_be_freed()) freeable.push_back(flat->get());
  }
  model_.schedule()->Start(std::move(freeable));
  if (guard_->served() != nullptr) guard_->served()->EndUpdate();
  return model_.comm()->AgreeOk(MakeOptimizer(), "Engine::Create");
}

absl::Status Engine::Impl::MakeOptimizer() {
  absl::Status mine;
  if (settings_.loss_scaler.has_value()) {
    auto scaler = LossScaler::Create(*settings_.loss_scaler);
    mine.Update(scaler.status());
    if (scaler.ok()) optimization_.SetScaler(*scaler);
  }
  if (settings_.optimizer.has_value()) {
    auto optimizer = ShardedOptimizer::Create(model_.flats(), groups_.groups());
    mine.Update(optimizer.status());
    if (optimizer.ok()) {
      (*optimizer)->early().SetBytes(settings_.offload.early_bytes);
      optimization_.SetOptimizer(*std::move(optimizer));
    }
  }
  return mine;
}

// By the flats' own slots: names and tensors of a storage are one there.
absl::Status Engine::Impl::MakeRecomputed(absl::Span<const UnitPlan> units) {
  const RecomputeChoice& choice = settings_.recomputed;
  if (choice.units.empty() && !choice.is_recomputed) {
    NoteIfNoneMoves(settings_.activations);
    return absl::OkStatus();
  }
  TESSERA_ASSIGN_OR_RETURN(const RecomputedModules found,
                           ChooseRecomputed(model_.module(), units, choice));
  RecomputeOptions options = settings_.recompute;
  TESSERA_ASSIGN_OR_RETURN(
      options.store,
      MakeActivationStore(settings_.activations, model_.module().buffers(),
                          model_.device(), model_.comm()->rank()));
  if (options.store == nullptr && !options.recomputes) return absl::OkStatus();
  auto recomputed = std::make_unique<RecomputedUnits>(std::move(options));
  for (const RecomputedModule& module : found.modules) {
    for (const at::Tensor& p : module.parameters) {
      const StorageOwner owned = Registry::Global().Find(p);
      if (!owned) continue;
      recomputed->Add(module.path, owned.flat.get(), owned.slot);
    }
  }
  for (const at::Tensor& p : found.shared) {
    const StorageOwner owned = Registry::Global().Find(p);
    if (owned) recomputed->AddShared(owned.flat.get(), owned.slot);
  }
  trainer_.SetRecomputed(std::move(recomputed));
  return absl::OkStatus();
}

// Last of all, since it tells what has become of the module.
absl::Status Engine::Impl::MakeObserver(const EngineOptions& options) {
  TESSERA_ASSIGN_OR_RETURN(
      observer_, StepObserver::Create(&model_, &config_, &monitor_,
                                      {plan_.get(), options.metrics_writers}));
  trainer_.SetObserver(observer_.get());
  return absl::OkStatus();
}

// When parameters have the memory that they train in.
absl::Status Engine::Impl::MakePipeline() {
  if (!model_.has_stages()) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(
      pipeline_, PipelineBatches::Create(
                     &model_, ScheduleOf(config_),
                     static_cast<int>(config_.gradient_accumulation_steps()),
                     stages_.parameters()));
  return absl::OkStatus();
}

absl::Status Engine::Impl::MakeBufferSync() {
  if (!settings_.buffer_sync.has_value()) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(
      auto sync, BufferSync::Create(&model_.module(), *settings_.buffer_sync,
                                    model_.device(), model_.data()));
  trainer_.SetBufferSync(std::move(sync));
  return absl::OkStatus();
}

}  // namespace tessera
