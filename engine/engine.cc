#include "engine/engine.h"

#include <utility>

#include "ATen/ops/full_like.h"
#include "absl/strings/str_cat.h"
#include "base/memory.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "comm/world.h"
#include "config/config.h"
#include "engine/replicas.h"
#include "engine/training_state.h"
#include "engine/unimplemented.h"
#include "engine/world_options.h"
#include "optim/adamw.h"
#include "sharding/gradients.h"
#include "sharding/partition.h"
#include "sharding/registry.h"
#include "sharding/saved_tensors.h"
#include "sharding/schedule.h"
#include "sharding/storage_access.h"
#include "sharding/tag.h"
#include "sharding/torch_scope.h"
#include "sharding/unit.h"
#include "torch/csrc/autograd/variable.h"
#include "torch/nn/module.h"

namespace tessera {
namespace {

AdamWOptions OptionsOf(const proto::AdamParams& params) {
  AdamWOptions options;
  options.lr = params.lr();
  options.beta1 = params.betas(0);
  options.beta2 = params.betas(1);
  options.eps = params.eps();
  options.weight_decay = params.weight_decay();
  return options;
}

ScheduleOptions ScheduleOf(const EngineOptions& options) {
  ScheduleOptions schedule;
  if (options.live_units == 0) schedule.max_live = 0;
  return schedule;
}

absl::Status CheckLoss(const at::Tensor& loss) {
  if (!loss.defined()) {
    return absl::InvalidArgumentError("Backward: the loss is undefined");
  }
  if (loss.numel() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("Backward: expected a loss of one element, got ",
                     loss.numel(), "; take its mean or sum"));
  }
  if (!loss.requires_grad()) {
    return absl::InvalidArgumentError(
        "Backward: the loss does not require a gradient (was the forward run "
        "under NoGradGuard, or are all parameters frozen?)");
  }
  return absl::OkStatus();
}

}  // namespace

class Engine::Impl {
 public:
  Impl(std::shared_ptr<torch::nn::Module> module, proto::Config config,
       std::shared_ptr<Communicator> comm, const EngineOptions& options)
      : module_(std::move(module)),
        config_(std::move(config)),
        comm_(std::move(comm)),
        stage_(Stage::Of(config_.zero_optimization().stage())),
        schedule_(std::make_shared<Schedule>(ScheduleOf(options))) {}
  ~Impl();

  absl::Status Build(const EngineOptions& options);
  absl::Status Backward(const at::Tensor& loss);
  absl::Status Step();
  absl::Status ZeroGrad();
  absl::StatusOr<at::Tensor> Gradient(absl::string_view name);
  absl::StatusOr<at::Tensor> Parameter(absl::string_view name);
  absl::Status Save(const std::string& dir, absl::string_view client_state);
  absl::StatusOr<std::string> Load(const std::string& dir);
  absl::Status Close();

  StateBytes state_bytes() const;
  StateBytes replicated_state_bytes() const;
  int stage() const { return config_.zero_optimization().stage(); }
  int64_t step() const { return step_; }
  std::vector<std::string> DescribeUnits() const;

 private:
  struct Place {
    int unit, parameter;
  };
  absl::StatusOr<Place> Find(absl::string_view name) const;
  absl::Status CheckOpen() const;
  // After every use of parameters: frees, and checks that nothing pins.
  absl::Status MakeUpdatable();
  absl::Status Publish(bool only_with_gradient);
  absl::Status TakeOver(std::vector<UnitPlan> plans);
  absl::Status GiveBack(const absl::Status& why);
  TrainingState State();

  std::shared_ptr<torch::nn::Module> module_;
  proto::Config config_;
  std::shared_ptr<Communicator> comm_;
  Stage stage_;
  std::shared_ptr<Schedule> schedule_;
  std::vector<std::shared_ptr<Unit>> units_;
  std::unique_ptr<Gradients> gradients_;
  std::unique_ptr<AdamW> optimizer_;
  bool closed_ = false;
  bool has_backward_ = false;  // since the last Step
  int64_t micro_steps_ = 0;    // Steps since the last optimizer step
  int64_t step_ = 0;
};

Engine::Impl::~Impl() {
  gradients_.reset();
  for (const auto& unit : units_) {
    Registry::Global().Remove(*unit);
    unit->Abandon();
  }
}

absl::Status Engine::Impl::Build(const EngineOptions& options) {
  TESSERA_RETURN_IF_ERROR(
      CheckSame(absl::StrCat(config_.ShortDebugString(),
                             " live_units: ", options.live_units,
                             " max_unit_numel: ", options.max_unit_numel),
                "configuration", comm_.get()));
  absl::StatusOr<std::vector<UnitPlan>> plans =
      PlanUnits(*module_, options.max_unit_numel);
  if (plans.ok() && plans->empty()) {
    plans = absl::InvalidArgumentError("the module has no parameters");
  }
  if (plans.ok()) {
    for (const auto& plan : *plans) {
      for (const auto& p : plan.parameters) {
        if (!Registry::Global().Find(p.tensor)) continue;
        plans = absl::FailedPreconditionError(absl::StrCat(
            "parameter '", p.name,
            "' belongs to another tessera::Engine; Close() that one first"));
        break;
      }
      if (!plans.ok()) break;
    }
  }
  absl::Status mine = plans.status();
  mine.Update(CheckTagFallback());
  TESSERA_RETURN_IF_ERROR(comm_->AgreeOk(mine, "Engine::Create"));
  if (options.sync_from_rank0) {
    TESSERA_RETURN_IF_ERROR(BroadcastFromRank0(*module_, *plans, comm_.get()));
  }
  TESSERA_ASSIGN_OR_RETURN(std::vector<bool> expected,
                           CheckEqual(*plans, comm_.get()));
  mine = TakeOver(*std::move(plans));
  if (!mine.ok()) return GiveBack(mine);
  InstallSavedTensorHooks();
  gradients_ = std::make_unique<Gradients>(units_, comm_, GradientOptions(),
                                           std::move(expected));
  std::vector<Unit*> sharded;
  for (const auto& unit : units_) {
    if (unit->stage().sharded_parameters) sharded.push_back(unit.get());
  }
  schedule_->Start(std::move(sharded));
  return absl::OkStatus();
}

// Unit by unit on all ranks, so that all know what has been taken over.
absl::Status Engine::Impl::TakeOver(std::vector<UnitPlan> plans) {
  int index = 0;
  for (auto& plan : plans) {
    const int count = static_cast<int>(plan.parameters.size());
    UnitOptions options;
    options.stage = stage_;
    auto unit = Unit::Prepare(plan.name, std::move(plan.parameters), index,
                              options, comm_, schedule_);
    TESSERA_RETURN_IF_ERROR(comm_->AgreeOk(unit.status(), "Engine::Create"));
    (*unit)->Adopt();
    Registry::Global().Add(*unit);
    units_.push_back(*std::move(unit));
    index += count;
  }
  if (!config_.has_optimizer()) return absl::OkStatus();
  auto optimizer =
      AdamW::Create(units_, OptionsOf(config_.optimizer().params()));
  TESSERA_RETURN_IF_ERROR(comm_->AgreeOk(optimizer.status(), "Engine::Create"));
  optimizer_ = *std::move(optimizer);
  return absl::OkStatus();
}

// The module is again what it was before Create.
absl::Status Engine::Impl::GiveBack(const absl::Status& why) {
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

absl::Status Engine::Impl::CheckOpen() const {
  return closed_ ? absl::FailedPreconditionError("the engine was closed")
                 : absl::OkStatus();
}

absl::Status Engine::Impl::Backward(const at::Tensor& loss) {
  TESSERA_RETURN_IF_ERROR(CheckOpen());
  auto backward = [&] {
    ThrowIfError(CheckLoss(loss));
    const int64_t count = config_.gradient_accumulation_steps();
    at::Tensor seed;
    if (count > 1) {
      TorchScope scope;
      seed = at::full_like(loss, 1.0 / static_cast<double>(count));
    }
    loss.backward(seed);
    ThrowIfError(gradients_->CheckAttached());
  };
  MicroBatch micro_batch;
  micro_batch.position =
      absl::StrCat("optimizer step ", step_, ", micro-batch ", micro_steps_);
  absl::Status status = gradients_->Run(backward, micro_batch);
  schedule_->Border();
  if (status.ok()) has_backward_ = true;
  return status;
}

absl::Status Engine::Impl::MakeUpdatable() {
  ReleaseNodePins();
  schedule_->Border();
  for (const auto& unit : units_) {
    TESSERA_RETURN_IF_ERROR(unit->PrepareUpdate());
  }
  return absl::OkStatus();
}

// Owners' new values reach the others, and libtorch learns of the change: a
// graph that saved the old values fails in backward, as in plain libtorch.
absl::Status Engine::Impl::Publish(bool only_with_gradient) {
  for (size_t u = 0; u < units_.size(); ++u) {
    TESSERA_RETURN_IF_ERROR(units_[u]->PublishOwned());
    const auto& params = units_[u]->parameters();
    for (size_t i = 0; i < params.size(); ++i) {
      if (!only_with_gradient || gradients_->of(u).has_gradient(i)) {
        torch::autograd::impl::bump_version(params[i].tensor);
      }
    }
  }
  return absl::OkStatus();
}

absl::Status Engine::Impl::Step() {
  TESSERA_RETURN_IF_ERROR(CheckOpen());
  if (optimizer_ == nullptr) {
    return absl::FailedPreconditionError(
        "Step: the configuration has no optimizer");
  }
  if (!has_backward_) {
    return absl::FailedPreconditionError(
        "Step: no Backward of this engine since the last Step (a bare "
        "loss.backward() leaves gradients that are not reduced)");
  }
  if (micro_steps_ + 1 < config_.gradient_accumulation_steps()) {
    ++micro_steps_;
    has_backward_ = false;
    return absl::OkStatus();
  }
  absl::Status status = gradients_->CheckNothingPending();
  if (status.ok()) status = MakeUpdatable();
  if (status.ok()) status = optimizer_->Step(*gradients_);
  if (!status.ok()) {
    comm_->Announce(status);  // the others may wait for our part
    return status;
  }
  TESSERA_RETURN_IF_ERROR(Publish(/*only_with_gradient=*/true));
  gradients_->Zero();
  has_backward_ = false;
  micro_steps_ = 0;
  ++step_;
  return absl::OkStatus();
}

absl::Status Engine::Impl::ZeroGrad() {
  TESSERA_RETURN_IF_ERROR(CheckOpen());
  ReleaseNodePins();
  gradients_->Zero();
  has_backward_ = false;
  micro_steps_ = 0;
  return absl::OkStatus();
}

absl::StatusOr<Engine::Impl::Place> Engine::Impl::Find(
    absl::string_view name) const {
  TESSERA_RETURN_IF_ERROR(CheckOpen());
  for (size_t u = 0; u < units_.size(); ++u) {
    const auto& params = units_[u]->parameters();
    for (size_t i = 0; i < params.size(); ++i) {
      if (params[i].name == name) {
        return Place{static_cast<int>(u), static_cast<int>(i)};
      }
    }
  }
  return absl::NotFoundError(
      absl::StrCat("the module has no parameter '", name,
                   "' (names are those of named_parameters(); a tied one goes "
                   "by its first)"));
}

absl::StatusOr<at::Tensor> Engine::Impl::Gradient(absl::string_view name) {
  TESSERA_ASSIGN_OR_RETURN(Place place, Find(name));
  return CatchTorch("Gradient", [&] {
    TorchScope scope;
    return gradients_->of(place.unit).Whole(place.parameter);
  });
}

absl::StatusOr<at::Tensor> Engine::Impl::Parameter(absl::string_view name) {
  TESSERA_ASSIGN_OR_RETURN(Place place, Find(name));
  const auto& unit = units_[place.unit];
  return CatchTorch("Parameter", [&] {
    PinSet pins;
    pins.Add(unit);
    TorchScope scope;
    at::Tensor copy = unit->parameters()[place.parameter].tensor.clone();
    RemoveTag(copy);
    return copy;
  });
}

TrainingState Engine::Impl::State() {
  return {units_, optimizer_.get(), comm_.get(), stage(), step_};
}

absl::Status Engine::Impl::Save(const std::string& dir,
                                absl::string_view client_state) {
  TESSERA_RETURN_IF_ERROR(CheckOpen());
  absl::Status mine;
  if (has_backward_ || micro_steps_ > 0) {
    mine = absl::FailedPreconditionError(
        "in the middle of a step; save after Step at an accumulation boundary");
  }
  if (mine.ok()) mine = MakeUpdatable();
  TESSERA_RETURN_IF_ERROR(comm_->AgreeOk(mine, "SaveCheckpoint"));
  return CatchTorch("SaveCheckpoint",
                    [&] { return SaveState(dir, State(), client_state); });
}

absl::StatusOr<std::string> Engine::Impl::Load(const std::string& dir) {
  TESSERA_RETURN_IF_ERROR(CheckOpen());
  TESSERA_RETURN_IF_ERROR(comm_->AgreeOk(MakeUpdatable(), "LoadCheckpoint"));
  TESSERA_ASSIGN_OR_RETURN(
      LoadedState loaded,
      CatchTorch("LoadCheckpoint", [&] { return LoadState(dir, State()); }));
  TESSERA_RETURN_IF_ERROR(Publish(/*only_with_gradient=*/false));
  TESSERA_RETURN_IF_ERROR(ZeroGrad());
  step_ = loaded.step;
  return loaded.client_state;
}

absl::Status Engine::Impl::Close() {
  TESSERA_RETURN_IF_ERROR(CheckOpen());
  TESSERA_RETURN_IF_ERROR(comm_->AgreeOk(MakeUpdatable(), "Engine::Close"));
  absl::Status status;
  for (const auto& unit : units_) {
    status.Update(unit->Release());
    if (status.ok()) Registry::Global().Remove(*unit);
  }
  TESSERA_RETURN_IF_ERROR(status);
  gradients_.reset();
  optimizer_.reset();
  units_.clear();
  closed_ = true;
  return absl::OkStatus();
}

StateBytes Engine::Impl::state_bytes() const {
  StateBytes bytes;
  if (closed_) return bytes;
  for (const auto& unit : units_) bytes.parameters += unit->resident_bytes();
  bytes.gradients = gradients_->resident_bytes();
  if (optimizer_ != nullptr) bytes.optimizer = optimizer_->resident_bytes();
  return bytes;
}

StateBytes Engine::Impl::replicated_state_bytes() const {
  StateBytes bytes;
  for (const auto& unit : units_) {
    bytes.parameters += unit->layout().payload_numel() * 4;
  }
  bytes.gradients = bytes.parameters;
  if (optimizer_ != nullptr) bytes.optimizer = 2 * bytes.parameters;
  return bytes;
}

std::vector<std::string> Engine::Impl::DescribeUnits() const {
  std::vector<std::string> lines;
  for (const auto& unit : units_) {
    int64_t numel = 0;
    for (const auto& p : unit->parameters()) numel += p.tensor.numel();
    lines.push_back(absl::StrCat(unit->name(), ": ", unit->parameters().size(),
                                 " parameters, ", numel, " elements"));
  }
  return lines;
}

namespace {

absl::StatusOr<std::shared_ptr<Communicator>> GroupOf(
    const EngineOptions& options) {
  if (options.communicator != nullptr) return options.communicator;
  if (World::Current() != nullptr) return World::Current()->communicator();
  return absl::FailedPreconditionError(
      "Engine::Create: call tessera::Init first, or set "
      "EngineOptions::communicator");
}

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(
    std::shared_ptr<torch::nn::Module> module, absl::string_view config_path,
    EngineOptions options) {
  TESSERA_ASSIGN_OR_RETURN(options.communicator, GroupOf(options));
  auto config =
      LoadConfig(std::string(config_path), options.communicator->world_size());
  TESSERA_RETURN_IF_ERROR(
      options.communicator->AgreeOk(config.status(), "configuration"));
  return Create(std::move(module), *config, std::move(options));
}

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(
    std::shared_ptr<torch::nn::Module> module, const proto::Config& config,
    EngineOptions options) {
  TESSERA_ASSIGN_OR_RETURN(auto comm, GroupOf(options));
  auto resolved = ResolveConfig(config, comm->world_size());
  if (resolved.ok()) {
    const absl::Status done = CheckImplemented(*resolved);
    if (!done.ok()) resolved = done;
  }
  if (resolved.ok() && module == nullptr) {
    resolved = absl::InvalidArgumentError("Engine::Create: module is null");
  }
  if (resolved.ok() && (options.live_units < 0 || options.max_unit_numel < 1)) {
    resolved = absl::InvalidArgumentError(absl::StrCat(
        "EngineOptions: expected live_units >= 0 and max_unit_numel >= 1, got ",
        options.live_units, " and ", options.max_unit_numel));
  }
  const World* const world = World::Current();
  if (resolved.ok() && world != nullptr && world->communicator() == comm) {
    const absl::Status made =
        CheckCommunication(resolved->communication(), world->options());
    if (!made.ok()) resolved = made;
  }
  TESSERA_RETURN_IF_ERROR(comm->AgreeOk(resolved.status(), "configuration"));
  auto impl = std::make_unique<Impl>(std::move(module), *std::move(resolved),
                                     std::move(comm), options);
  auto built =
      CatchTorch("Engine::Create", [&] { return impl->Build(options); });
  TESSERA_RETURN_IF_ERROR(built);
  return std::unique_ptr<Engine>(new Engine(std::move(impl)));
}

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Engine::~Engine() = default;
absl::Status Engine::Backward(const at::Tensor& loss) {
  return impl_->Backward(loss);
}
absl::Status Engine::Step() { return impl_->Step(); }
absl::Status Engine::ZeroGrad() { return impl_->ZeroGrad(); }
absl::StatusOr<at::Tensor> Engine::Gradient(absl::string_view name) {
  return impl_->Gradient(name);
}
absl::StatusOr<at::Tensor> Engine::Parameter(absl::string_view name) {
  return impl_->Parameter(name);
}
absl::Status Engine::SaveCheckpoint(const std::string& dir,
                                    absl::string_view client_state) {
  return impl_->Save(dir, client_state);
}
absl::StatusOr<std::string> Engine::LoadCheckpoint(const std::string& dir) {
  return impl_->Load(dir);
}
absl::Status Engine::Close() { return impl_->Close(); }
StateBytes Engine::state_bytes() const { return impl_->state_bytes(); }
StateBytes Engine::replicated_state_bytes() const {
  return impl_->replicated_state_bytes();
}
int Engine::stage() const { return impl_->stage(); }
int64_t Engine::step() const { return impl_->step(); }
std::vector<std::string> Engine::DescribeUnits() const {
  return impl_->DescribeUnits();
}

}  // namespace tessera
