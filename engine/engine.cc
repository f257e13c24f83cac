#include "engine/engine.h"

#include <utility>

#include "ATen/autocast_mode.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "base/trace/trace.h"
#include "c10/core/CachingDeviceAllocator.h"
#include "comm/catch_announced.h"
#include "comm/world/world.h"
#include "config/config.h"
#include "engine/auto_config.h"
#include "engine/build/custom_checks.h"
#include "engine/build/initial_sync.h"
#include "engine/checkpoint/safetensors_loading.h"
#include "engine/engine_impl.h"
#include "engine/program/seeds.h"
#include "engine/program/world_options.h"
#include "engine/values/averages.h"
#include "engine/values/model_report.h"
#include "engine/values/moved_states.h"
#include "engine/values/state_dict.h"
#include "engine/values/summoned.h"
#include "optim/algorithms/option_names.h"

namespace tessera {
namespace {

absl::StatusOr<std::shared_ptr<Communicator>> GroupOf(
    const EngineOptions& options) {
  if (options.communicator != nullptr) return options.communicator;
  if (World::Current() != nullptr) return World::Current()->communicator();
  return absl::FailedPreconditionError(
      "Engine::Create: call tessera::Init first, or set "
      "EngineOptions::communicator");
}

int PlanWorld() {
  return World::Current() == nullptr ? 0 : World::Current()->plan_world();
}

// What Create, a load or a move had and training does not ask for, since its
// sizes are others. What an allocator cannot give back it keeps.
void ReturnMemory(const ShardedModel& model) {
  ReturnKept();
  const at::Device device = model.device();
  if (device.is_cpu()) return;
  (void)CatchTorch(
      "memory", [&] { c10::getDeviceAllocator(device.type())->emptyCache(); });
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(
    std::shared_ptr<torch::nn::Module> module, absl::string_view config_path,
    EngineOptions options) {
  TESSERA_ASSIGN_OR_RETURN(options.communicator, GroupOf(options));
  const int planned = PlanWorld();
  auto config =
      LoadConfig(std::string(config_path),
                 planned > 0 ? planned : options.communicator->world_size(),
                 options.auto_values);
  TESSERA_RETURN_IF_ERROR(
      options.communicator->AgreeOk(config.status(), "configuration"));
  return Create(std::move(module), *config, std::move(options));
}

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(
    std::shared_ptr<torch::nn::Module> module, const proto::Config& config,
    EngineOptions options) {
  TESSERA_ASSIGN_OR_RETURN(auto comm, GroupOf(options));
  if (PlanWorld() > 0 && module != nullptr) {
    return CatchAnnounced(comm.get(), "--plan_world", [&] {
      return PlanAndEnd(*module, config, options, PlanWorld(), comm.get());
    });
  }
  auto resolved = ResolveConfig(config, comm->world_size());
  if (resolved.ok() && module == nullptr) {
    resolved = absl::InvalidArgumentError("Engine::Create: module is null");
  }
  if (resolved.ok()) {
    absl::Status runnable = CheckRunnable(*resolved);
    if (runnable.ok()) runnable = CheckCustom(*resolved, options.optimizer);
    if (!runnable.ok()) resolved = runnable;
  }
  const World* const world = World::Current();
  if (resolved.ok() && world != nullptr && world->communicator() == comm) {
    const absl::Status made =
        CheckCommunication(resolved->communication(), world->options());
    if (!made.ok()) resolved = made;
  }
  TESSERA_RETURN_IF_ERROR(comm->AgreeOk(resolved.status(), "configuration"));
  TESSERA_RETURN_IF_ERROR(
      CheckSame(resolved->ShortDebugString(), "configuration", comm.get()));
  TESSERA_ASSIGN_OR_RETURN(
      AutoConfig decided, CatchAnnounced(comm.get(), "Engine::Create", [&] {
        return DecideAuto(*module, *resolved, options, comm.get());
      }));
  if (!decided.recomputes) options.is_recomputed = nullptr;
  if (options.plan == nullptr) options.plan = decided.plan;
  auto impl = std::make_unique<Impl>(
      std::move(module), std::move(decided.config), std::move(comm), options);
  impl->set_auto(std::move(decided.reason),
                 resolved->zero_optimization().auto_stage() &&
                     options.resume_from.empty());
  const absl::Status built =
      CatchAnnounced(impl->model().comm(), "Engine::Create",
                     [&] { return impl->Build(options); });
  if (!built.ok()) {
    impl->groups().RestoreRequiresGrad();
    return built;
  }
  ReturnMemory(impl->model());
  const Mesh& mesh = impl->model().mesh();
  SeedThisRank(mesh.size(kCp) * mesh.size(kTp),
               mesh.size(kPp) == 1 ? 0 : mesh.size(kDpCp) * mesh.size(kTp));
  return std::unique_ptr<Engine>(new Engine(std::move(impl)));
}

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Engine::~Engine() {
  impl_.reset();
  ReturnKept();
}

NoSyncScope::NoSyncScope(Engine* engine) : engine_(engine) {
  engine_->impl_->trainer().ChangeNoSync(1);
}
NoSyncScope::~NoSyncScope() { engine_->impl_->trainer().ChangeNoSync(-1); }

// What autocast was before.
struct AutocastScope::State {
  at::DeviceType device;
  bool enabled;
  at::ScalarType dtype;
};

AutocastScope::AutocastScope(Engine* engine) {
  engine->impl_->trainer().NoteAutocast();
  const auto dtype = engine->impl_->settings().autocast_dtype;
  if (!dtype.has_value()) return;
  const at::DeviceType device = engine->impl_->model().device().type();
  state_ = std::make_unique<State>(
      State{device, at::autocast::is_autocast_enabled(device),
            at::autocast::get_autocast_dtype(device)});
  at::autocast::set_autocast_enabled(device, true);
  at::autocast::set_autocast_dtype(device, *dtype);
  at::autocast::increment_nesting();
}

AutocastScope::~AutocastScope() {
  if (state_ == nullptr) return;
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(state_->device, state_->enabled);
  at::autocast::set_autocast_dtype(state_->device, state_->dtype);
}

absl::Status Engine::Backward(const at::Tensor& loss, BackwardOptions options) {
  if (pipeline_stages() > 1) {
    return absl::FailedPreconditionError(absl::StrCat(
        "Engine::Backward with pipeline.stages ", pipeline_stages(),
        ": a stage has several micro-batches under way; call "
        "Engine::TrainBatch, or BackwardBatch and Step"));
  }
  return impl_->trainer().Backward(loss, options);
}
absl::StatusOr<std::vector<at::Tensor>> Engine::BackwardBatch(
    const MicroBatchLoss& loss, const BatchOptions& options) {
  return impl_->BackwardBatch(loss, options);
}
absl::StatusOr<std::vector<at::Tensor>> Engine::TrainBatch(
    const MicroBatchLoss& loss, const BatchOptions& options) {
  TESSERA_ASSIGN_OR_RETURN(std::vector<at::Tensor> losses,
                           impl_->BackwardBatch(loss, options));
  TESSERA_RETURN_IF_ERROR(Step());
  return losses;
}
absl::StatusOr<at::Tensor> Engine::EvalBatch(
    const std::function<absl::StatusOr<at::Tensor>()>& forward) {
  return impl_->EvalBatch(forward);
}
absl::StatusOr<bool> Engine::AnyRankHasData(bool this_rank) {
  return impl_->trainer().AnyRankHasData(this_rank);
}
absl::StatusOr<std::vector<NonFiniteGradient>> Engine::NonFiniteGradients() {
  return impl_->trainer().NonFiniteGradients();
}
absl::Status Engine::Step() { return impl_->trainer().Step(); }
const StepReport& Engine::last_step() const {
  return impl_->trainer().last_step();
}
Monitor& Engine::monitor() { return impl_->monitor(); }
void Engine::RecordMemory() { impl_->trainer().memory().RecordMemory(); }
absl::Status Engine::WriteMemoryTimeline(const std::string& prefix) {
  return impl_->trainer().memory().WriteMemoryTimeline(prefix);
}
absl::Status Engine::SetLearningRate(double rate) {
  return impl_->groups().SetLearningRate(rate);
}
absl::Status Engine::ReportMetric(double metric) {
  return impl_->groups().ReportMetric(metric);
}
absl::Status Engine::SetOption(absl::string_view group,
                               absl::string_view option, double value) {
  return impl_->trainer().SetOption(group, option, value);
}
absl::StatusOr<double> Engine::OptionOf(absl::string_view group,
                                        absl::string_view option) const {
  TESSERA_ASSIGN_OR_RETURN(const size_t number, impl_->groups().Find(group));
  return tessera::OptionOf(option, impl_->groups().groups().options[number]);
}
std::vector<std::string> Engine::GroupNames() const {
  return impl_->groups().groups().names;
}
absl::Status Engine::SetFrozen(absl::string_view group, bool frozen) {
  return impl_->trainer().SetFrozen(group, frozen);
}
absl::Status Engine::SwapInAverages() {
  TESSERA_RETURN_IF_ERROR(impl_->trainer().CheckAtBoundary());
  return SwapAverages(impl_->guard().get(), impl_->optimization(),
                      impl_->groups(), /*in=*/true);
}
absl::Status Engine::SwapOutAverages() {
  impl_->trainer().AwaitOutcome();
  return SwapAverages(impl_->guard().get(), impl_->optimization(),
                      impl_->groups(), /*in=*/false);
}
absl::Status Engine::ZeroGrad() { return impl_->trainer().ZeroGrad(); }
absl::StatusOr<at::Tensor> Engine::Gradient(absl::string_view name) {
  impl_->trainer().AwaitOutcome();  // it is divided by the loss scale
  return impl_->access().Gradient(name);
}
absl::StatusOr<at::Tensor> Engine::Parameter(absl::string_view name) {
  return impl_->access().Parameter(name);
}
absl::StatusOr<at::Tensor> Engine::Master(absl::string_view name) {
  TESSERA_RETURN_IF_ERROR(impl_->trainer().CheckNotFailed());
  return impl_->access().Master(name);
}
absl::StatusOr<at::Tensor> Engine::OptimizerStateOf(absl::string_view name,
                                                    absl::string_view state) {
  TESSERA_RETURN_IF_ERROR(impl_->trainer().CheckNotFailed());
  return impl_->access().State(name, state);
}
absl::Status Engine::SetMaster(absl::string_view name,
                               const at::Tensor& value) {
  return impl_->access().SetMaster(name, value);
}
absl::Status Engine::SetGradient(absl::string_view name,
                                 const at::Tensor& value) {
  impl_->trainer().AwaitOutcome();
  return impl_->access().SetGradient(name, value);
}
absl::Status Engine::SetOptimizerState(absl::string_view name,
                                       absl::string_view state,
                                       const at::Tensor& value) {
  return impl_->access().SetState(name, state, value);
}
absl::StatusOr<StateDict> Engine::FullStateDict(StateDictOptions options) {
  TESSERA_RETURN_IF_ERROR(impl_->trainer().CheckNotFailed());
  return tessera::FullStateDict(impl_->guard().get(), &impl_->writes(),
                                options);
}
absl::StatusOr<std::vector<ParameterShard>> Engine::ShardedStateDict() {
  TESSERA_RETURN_IF_ERROR(impl_->trainer().CheckNotFailed());
  return tessera::ShardedStateDict(impl_->guard().get());
}
absl::StatusOr<LoadSafetensorsReport> Engine::LoadSafetensors(
    const std::string& path, LoadSafetensorsOptions options) {
  auto report = tessera::LoadSafetensors(impl_->guard().get(), path, options);
  ReturnMemory(impl_->model());
  return report;
}

struct SummonScope::State {
  std::unique_ptr<Summoned> summoned;
};
SummonScope::SummonScope(std::unique_ptr<State> state)
    : state_(std::move(state)) {}
SummonScope::SummonScope(SummonScope&&) noexcept = default;
SummonScope& SummonScope::operator=(SummonScope&& other) noexcept {
  state_.swap(other.state_);
  return *this;
}
SummonScope::~SummonScope() = default;
absl::Status SummonScope::Close() {
  return state_ == nullptr ? absl::OkStatus() : state_->summoned->Close();
}
absl::StatusOr<SummonScope> Engine::Summon(
    const std::vector<at::Tensor>& parameters, SummonOptions options) {
  TESSERA_ASSIGN_OR_RETURN(auto summoned,
                           Summoned::Open(impl_->guard(), parameters, options));
  return SummonScope(std::make_unique<SummonScope::State>(
      SummonScope::State{std::move(summoned)}));
}
absl::StatusOr<SummonScope> Engine::SummonByName(
    const std::vector<std::string>& names, SummonOptions options) {
  TESSERA_ASSIGN_OR_RETURN(
      auto summoned,
      Summoned::Open(impl_->guard(),
                     ParametersByName(impl_->model().module(), names),
                     options));
  return SummonScope(std::make_unique<SummonScope::State>(
      SummonScope::State{std::move(summoned)}));
}

absl::Status Engine::Offload(const OffloadStates& states) {
  TESSERA_RETURN_IF_ERROR(impl_->trainer().CheckNotFailed());
  const absl::Status moved =
      OffloadStatesOf(impl_->guard().get(), impl_->settings().offload, states);
  ReturnMemory(impl_->model());
  return moved;
}
absl::Status Engine::Reload() {
  TESSERA_RETURN_IF_ERROR(impl_->trainer().CheckNotFailed());
  return ReloadStatesOf(impl_->guard().get());
}

absl::Status Engine::SetPrefetch(absl::string_view unit, Pass pass,
                                 const std::vector<std::string>& next) {
  TESSERA_RETURN_IF_ERROR(impl_->life().CheckOpen());
  const ShardedModel& model = impl_->model();
  TESSERA_ASSIGN_OR_RETURN(FlatParameter* const of, model.FindFlat(unit));
  std::vector<Gatherable*> flats;
  for (const std::string& name : next) {
    TESSERA_ASSIGN_OR_RETURN(FlatParameter* const one, model.FindFlat(name));
    flats.push_back(one);
  }
  model.schedule()->SetPrefetch(
      of, pass == Pass::kForward ? Phase::kForward : Phase::kBackward,
      std::move(flats));
  return absl::OkStatus();
}
absl::Status Engine::SetReshardAfterForward(absl::string_view unit,
                                            bool reshard) {
  TESSERA_RETURN_IF_ERROR(impl_->life().CheckOpen());
  const ShardedModel& model = impl_->model();
  TESSERA_ASSIGN_OR_RETURN(FlatParameter* const of, model.FindFlat(unit));
  model.schedule()->SetReshardAfterForward(of, reshard);
  return absl::OkStatus();
}
absl::Status Engine::SaveCheckpoint(const std::string& dir,
                                    absl::string_view client_state,
                                    SaveOptions options) {
  return impl_->SaveCheckpoint(dir, client_state, options);
}
absl::Status Engine::WaitForCheckpoint() {
  const TraceScope trace(TraceTrack::kMain, "WaitForCheckpoint");
  TESSERA_RETURN_IF_ERROR(impl_->life().CheckOpen());
  return impl_->saver().Wait();
}
void Engine::SettleCheckpoint() { impl_->saver().Settle(); }
absl::Status Engine::SaveSafetensors(const std::string& dir,
                                     const SaveSafetensorsOptions& options) {
  return impl_->SaveSafetensors(dir, options);
}
bool Engine::node_local_checkpoints() const {
  return impl_->config().checkpoint().use_node_local_storage();
}
void Engine::NoteManaged() { impl_->trainer().NoteManaged(); }
bool Engine::saving_checkpoint() const { return impl_->saver().saving(); }
absl::StatusOr<LoadCheckpointReport> Engine::LoadCheckpoint(
    const std::string& dir, LoadCheckpointOptions options) {
  auto report = impl_->LoadCheckpoint(dir, options);
  ReturnMemory(impl_->model());
  return report;
}
absl::Status Engine::Close() { return impl_->Close(); }
StateBytes Engine::state_bytes() const {
  return ResidentStateBytes(impl_->model(), impl_->optimization());
}
StateBytes Engine::replicated_state_bytes() const {
  return ReplicatedStateBytes(impl_->model(), impl_->groups().groups());
}
const std::shared_ptr<Communicator>& Engine::communicator() const {
  return impl_->model().mesh().job();
}
int Engine::data_world_size() const { return impl_->model().mesh().size(kDp); }
int Engine::data_rank() const { return impl_->model().mesh().coordinate(kDp); }
const std::vector<TensorCut>& Engine::tensor_cuts() const {
  return impl_->tensor_cuts();
}
int Engine::pipeline_stage() const {
  return impl_->model().mesh().coordinate(kPp);
}
int Engine::pipeline_stages() const { return impl_->model().mesh().size(kPp); }
int Engine::stage() const { return impl_->model().stage(); }
const std::string& Engine::auto_reason() const { return impl_->auto_reason(); }
const proto::Config& Engine::config() const { return impl_->config(); }
const std::shared_ptr<const PlanReport>& Engine::plan() const {
  return impl_->plan();
}
int64_t Engine::step() const { return impl_->trainer().step(); }
int64_t Engine::step_at_most() const { return impl_->trainer().step_at_most(); }
int64_t Engine::updates() const { return impl_->trainer().updates(); }
absl::StatusOr<std::string> Engine::UnitOf(absl::string_view parameter) const {
  TESSERA_RETURN_IF_ERROR(impl_->life().CheckOpen());
  TESSERA_ASSIGN_OR_RETURN(const ParameterRef place,
                           impl_->model().Find(parameter));
  return impl_->model().flat(place).name();
}
std::vector<std::string> Engine::DescribeUnits() const {
  return tessera::DescribeUnits(impl_->model());
}

}  // namespace tessera
