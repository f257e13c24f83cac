#include "engine/engine_impl.h"

#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"
#include "base/torch/device_ledger.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "base/trace/trace.h"
#include "comm/catch_announced.h"
#include "config/config.h"
#include "engine/build/rate_settings.h"
#include "engine/checkpoint/safetensors_saving.h"
#include "engine/checkpoint/training_state.h"
#include "engine/model/exclusive_scope.h"
#include "engine/program/unclosed.h"

namespace tessera {
namespace {

// Where a run is that goes on from it. Older checkpoints count no samples.
RunPlace PlaceOf(const proto::Config& config, const LoadedState& loaded) {
  RunPlace place;
  place.step = loaded.step;
  place.skipped_steps = loaded.skipped_steps;
  place.samples =
      loaded.samples.value_or(loaded.step * config.train_batch_size());
  return place;
}

std::string WasAndIs(absl::string_view what, int64_t was, int64_t is) {
  return was == is ? absl::StrCat(", ", what, " ", is)
                   : absl::StrCat(", ", what, " ", was, " -> ", is);
}

// What goes on, for people: "->" where something has changed.
std::string DescribeLoaded(const ShardedModel& model, int64_t batch,
                           const std::string& dir, const LoadedState& loaded,
                           const std::optional<RunPlace>& place) {
  if (!place.has_value()) {
    return absl::StrCat("loaded parameters and buffers of step ", loaded.step,
                        " from ", dir,
                        "; optimizer states and step stay this run's");
  }
  std::string text = absl::StrCat("resumed at step ", place->step, " (",
                                  place->samples, " samples) from ", dir);
  absl::StrAppend(
      &text,
      WasAndIs("ranks", loaded.report.world_size, model.comm()->world_size()),
      WasAndIs("stage", loaded.report.stage, model.stage()));
  const int64_t was = loaded.batch.value_or(batch);
  absl::StrAppend(&text, WasAndIs("batch", was, batch));
  if (was != batch) {
    absl::StrAppend(&text,
                    ": a step has other samples than before, so a learning "
                    "rate, schedule and number of steps that were chosen for ",
                    was, " mean something else");
  }
  return text;
}

// Owners' masters reach all working copies.
absl::Status PublishAll(
    const std::vector<std::shared_ptr<FlatParameter>>& flats) {
  for (const auto& flat : flats) {
    TESSERA_RETURN_IF_ERROR(flat->PublishOwned());
    (void)flat->TakePlacedWrites();  // all ranks have the same again
  }
  return absl::OkStatus();
}

}  // namespace

Engine::Impl::Impl(std::shared_ptr<torch::nn::Module> module,
                   proto::Config config, std::shared_ptr<Communicator> comm,
                   const EngineOptions& options)
    : config_(std::move(config)),
      plan_(options.plan),
      settings_(SettingsOf(config_, options,
                           comm->world_size() / TensorRanksOf(config_) /
                               PipelineRanksOf(config_))),
      model_(std::move(module), std::move(comm)),
      life_(&optimization_),
      guard_(std::make_shared<UpdateGuard>(&model_, &life_,
                                           [this] { saver_.BeforeChange(); })),
      groups_(&model_, &life_, LrScheduleOf(config_)),
      writes_(&model_, settings_.check_writes),
      trainer_(Trainer::Needs{.guard = guard_.get(),
                              .optimization = &optimization_,
                              .groups = &groups_,
                              .writes = &writes_,
                              .config = &config_,
                              .settings = &settings_,
                              .plan = plan_.get()}),
      access_(guard_.get(), &optimization_) {}

Engine::Impl::~Impl() {
  saver_.Settle();
  const absl::Status untold = trainer_.TakeUntold();
  if (!untold.ok()) {
    TESSERA_LOG(ERROR) << "of the last Step, and nobody has asked: "
                       << untold.message();
  }
  if (!life_.closed() && std::uncaught_exceptions() == 0) {
    trainer_.End(/*wait=*/false);
    if (trainer_.step_called()) NoteUnclosedEngine();
  }
  if (observer_ != nullptr) {
    observer_->Complete(trainer_.last_step(), trainer_.place());
    observer_->Abandon(std::uncaught_exceptions() > 0 || !untold.ok() ||
                       trainer_.has_failed());
  }
  if (guard_->stream() != nullptr) {
    guard_->stream()->SetBeforeWrite(nullptr);
    (void)guard_->stream()->Drain();  // it reads gradients and states
  }
  trainer_.Detach();
  optimization_.DropGradients();
  if (guard_->served() != nullptr) guard_->served()->Stop();
  for (const auto& flat : model_.flats()) flat->Abandon();
}

TrainingState Engine::Impl::State() {
  return {.model = model_,
          .optimization = optimization_,
          .groups = groups_,
          .config = config_,
          .place = trainer_.place()};
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
  const absl::Status given = Close();
  return given.ok() ? why : NotGivenBack(why, given);
}

// All ranks have let go of the units when the first of them is given back, and
// none is used again, so there is nothing to commit. An error leaves the rest
// with the engine: Close may be called again.
absl::Status Engine::Impl::Close() {
  TESSERA_RETURN_IF_ERROR(life_.CheckOpen());
  // What is asked for here is the module's, which held it before.
  const NoMemoryLimit unlimited(&LedgerOf(model_.device()));
  saver_.Settle();
  trainer_.AwaitOutcome();
  ExclusiveScope exclusive(guard_.get(), "Engine::Close");
  TESSERA_RETURN_IF_ERROR(exclusive.Begin());
  exclusive.Dismiss();
  trainer_.End(/*wait=*/true);
  if (observer_ != nullptr) {
    observer_->Complete(trainer_.last_step(), trainer_.place());
    observer_->Close();
  }
  for (const auto& flat : model_.flats()) {
    const absl::Status released =
        CatchTorch("Close", [&] { return flat->Release(); });
    if (!released.ok()) {
      model_.comm()->Announce(released);
      return released;
    }
  }
  pipeline_.reset();
  absl::Status whole = parts_.GiveBack();
  if (whole.ok()) whole = stages_.GiveBack();
  if (!whole.ok()) {
    model_.comm()->Announce(whole);
    return whole;
  }
  TESSERA_RETURN_IF_ERROR(CatchTorch("Close", [&] { buffers_.GiveBack(); }));
  groups_.RestoreRequiresGrad();
  if (guard_->served() != nullptr) guard_->served()->End();
  trainer_.Detach();
  optimization_.DropGradients();
  optimization_.DropOptimizer();
  model_.Clear();
  guard_->DropStream();
  process_.GiveBack();
  life_.Close();
  return trainer_.TakeUntold();  // there is no Step any more to say it
}

absl::Status NotGivenBack(const absl::Status& why, const absl::Status& given) {
  return absl::Status(
      why.code(),
      absl::StrCat(why.message(),
                   "; and the module's parameters could not be given back: ",
                   given.message()));
}

absl::StatusOr<std::vector<at::Tensor>> Engine::Impl::BackwardBatch(
    const MicroBatchLoss& loss, const BatchOptions& options) {
  TESSERA_RETURN_IF_ERROR(life_.CheckOpen());
  const int64_t count = config_.gradient_accumulation_steps();
  const auto weights = static_cast<int64_t>(options.weights.size());
  if (weights != 0 && weights != count) {
    return absl::InvalidArgumentError(
        absl::StrCat("BatchOptions::weights: expected ", count,
                     " (gradient_accumulation_steps), or none, got ", weights));
  }
  if (pipeline_ != nullptr) {
    return pipeline_->Backward(loss, options, &trainer_);
  }
  std::vector<at::Tensor> losses;
  for (int64_t i = 0; i < count; ++i) {
    const absl::StatusOr<at::Tensor> one =
        CatchTorch("forward", [&] { return loss(i); });
    if (!one.ok()) {  // the others learn it, and do not wait
      return trainer_.Backward(at::Tensor(), {}, one.status());
    }
    BackwardOptions how;
    if (weights > 0) how.weight = options.weights[static_cast<size_t>(i)];
    TESSERA_RETURN_IF_ERROR(trainer_.Backward(*one, how));
    losses.push_back(one->detach());
    if (i + 1 < count) TESSERA_RETURN_IF_ERROR(trainer_.Step());
  }
  return losses;
}

absl::StatusOr<at::Tensor> Engine::Impl::EvalBatch(
    const std::function<absl::StatusOr<at::Tensor>()>& forward) {
  TESSERA_RETURN_IF_ERROR(life_.CheckOpen());
  if (pipeline_ != nullptr) {
    return pipeline_->Evaluate(forward);
  }
  const at::NoGradGuard no_grad;
  return CatchTorch("forward", [&] { return forward(); });
}

absl::Status Engine::Impl::SaveCheckpoint(const std::string& dir,
                                          absl::string_view client_state,
                                          SaveOptions options) {
  const TraceScope trace(TraceTrack::kMain, "SaveCheckpoint");
  TESSERA_RETURN_IF_ERROR(life_.CheckOpen());
  saver_.Settle();  // first, or what it has not written yet would be copied
  ExclusiveScope exclusive(guard_.get(), "SaveCheckpoint");
  TESSERA_RETURN_IF_ERROR(exclusive.Begin(trainer_.CheckAtBoundary()));
  TESSERA_RETURN_IF_ERROR(exclusive.Commit(writes_.CheckBeforeSave()));
  return CatchAnnounced(model_.comm(), "SaveCheckpoint", [&] {
    const proto::Checkpoint& config = config_.checkpoint();
    PendingSaveOptions how;
    how.async = options.async.value_or(config.async());
    how.max_bandwidth = config.max_bandwidth();
    how.node_local =
        options.node_local.value_or(config.use_node_local_storage());
    how.replicas = config.replicas();
    how.after_commit = std::move(options.after_commit);
    how.replace = options.replace;
    how.saved_unix_micros = options.saved_unix_micros;
    TrainingState state = State();
    state.manager_state = std::move(options.manager_state);
    return saver_.Save(dir, state, client_state, std::move(how),
                       std::move(options.on_end));
  });
}

absl::Status Engine::Impl::SaveSafetensors(
    const std::string& dir, const SaveSafetensorsOptions& options) {
  TESSERA_RETURN_IF_ERROR(life_.CheckOpen());
  ExclusiveScope exclusive(guard_.get(), "SaveSafetensors");
  TESSERA_RETURN_IF_ERROR(exclusive.Begin(trainer_.CheckNotFailed()));
  TESSERA_RETURN_IF_ERROR(exclusive.Commit(writes_.CheckBeforeSave()));
  return CatchAnnounced(model_.comm(), "SaveSafetensors", [&] {
    return WriteSafetensorsOf(State(), dir, options);
  });
}

absl::StatusOr<LoadCheckpointReport> Engine::Impl::LoadCheckpoint(
    const std::string& dir, const LoadCheckpointOptions& options) {
  const TraceScope trace(TraceTrack::kMain, "LoadCheckpoint");
  TESSERA_RETURN_IF_ERROR(life_.CheckNotAveraged());
  TESSERA_RETURN_IF_ERROR(life_.CheckOpen());
  saver_.Settle();
  // What is asked for here is gone when it returns, and plans do not count it.
  const NoMemoryLimit unlimited(&LedgerOf(model_.device()));
  ExclusiveScope exclusive(guard_.get(), "LoadCheckpoint");
  TESSERA_RETURN_IF_ERROR(exclusive.Begin());
  absl::StatusOr<LoadedState> loaded = absl::UnknownError("not loaded");
  bool changed = false;
  const absl::Status run = CatchTorch("LoadCheckpoint", [&] {
    loaded = LoadState(dir, State(), options, &changed);
    return absl::OkStatus();
  });
  if (!run.ok()) return exclusive.Fail(run);
  // All ranks have come to it: LoadState agrees on what it returns.
  if (!loaded.ok()) {
    if (changed) guard_->FailTiers(loaded.status());
    return changed ? exclusive.Fail(loaded.status())
                   : exclusive.Commit(loaded.status());
  }
  const absl::Status published =
      CatchTorch("LoadCheckpoint", [&] { return PublishAll(model_.flats()); });
  if (!published.ok()) {
    guard_->FailTiers(published);
    return exclusive.Fail(published);
  }
  TESSERA_RETURN_IF_ERROR(exclusive.Commit());
  // Gradients of other values are dropped in any case.
  std::optional<RunPlace> place;
  if (!options.model_only) place = PlaceOf(config_, *loaded);
  TESSERA_RETURN_IF_ERROR(trainer_.Resume(place));
  TESSERA_LOG_RANK0(INFO) << DescribeLoaded(model_, config_.train_batch_size(),
                                            dir, *loaded, place);
  if (chose_stage_ && loaded->report.stage != model_.stage() &&
      loaded->report.world_size == model_.comm()->world_size()) {
    TESSERA_LOG_RANK0(WARNING)
        << dir << " was trained at stage " << loaded->report.stage
        << " by as many ranks, and auto has become stage " << model_.stage()
        << " here: set EngineOptions::resume_from to go on as it was";
  }
  return std::move(loaded->report);
}

}  // namespace tessera
