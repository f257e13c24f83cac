#include "engine/auto_config.h"

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "checkpoint/disk/folder.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "checkpoint/format/step_folders.h"
#include "comm/world/world.h"
#include "config/config.h"
#include "engine/plan/auto_choice.h"
#include "engine/plan/plan.h"
#include "engine/plan/rates.h"
#include "engine/setup/initial_sync.h"
#include "engine/setup/rank_memory.h"
#include "torch/nn/module.h"

namespace tessera {
namespace {

// The newest in `dir`, or the one that it is; nothing if there is none.
absl::StatusOr<std::optional<proto::CheckpointManifest>> FindManifest(
    const std::string& dir) {
  FileSystem* const files = FileSystem::Real();
  const auto read = [&](const std::string& path)
      -> absl::StatusOr<proto::CheckpointManifest> {
    TESSERA_ASSIGN_OR_RETURN(const Folder folder, Folder::Open(path, files));
    return ReadManifest(folder);
  };
  auto manifest = read(dir);
  if (manifest.ok()) return *std::move(manifest);
  if (!absl::IsNotFound(manifest.status())) return manifest.status();
  TESSERA_ASSIGN_OR_RETURN(const auto folders, ListStepFolders(dir, files));
  for (const StepFolder& folder : folders) {
    if (!folder.manifest.ok()) continue;
    TESSERA_ASSIGN_OR_RETURN(auto found,
                             read(absl::StrCat(dir, "/", folder.name)));
    return found;
  }
  return std::nullopt;
}

// Rank 0 reads; nothing where there is no checkpoint. COLLECTIVE.
absl::StatusOr<std::optional<proto::CheckpointTraining>> FindTraining(
    const std::string& dir, Communicator* comm) {
  if (dir.empty()) return std::nullopt;
  absl::StatusOr<std::optional<proto::CheckpointManifest>> found = std::nullopt;
  if (comm->rank() == 0) found = FindManifest(dir);
  TESSERA_RETURN_IF_ERROR(
      comm->AgreeOk(found.status(), "EngineOptions::resume_from"));
  std::string text;
  if (found->has_value()) text = (*found)->training().SerializeAsString();
  TESSERA_ASSIGN_OR_RETURN(
      const auto texts,
      comm->AllGatherStrings(text, {"how the checkpoint was trained"}));
  proto::CheckpointTraining training;
  if (texts[0].empty() || !training.ParseFromString(texts[0])) {
    return std::nullopt;
  }
  return training;
}

// `config`, with what it leaves to auto as `training` has it; nothing where
// that was another number of ranks, or another batch.
std::optional<proto::Config> AsTrained(
    const proto::Config& config, const proto::CheckpointTraining& training,
    int world_size) {
  if (training.world_size() != world_size) return std::nullopt;
  const auto theirs =
      ParseConfig(training.config(), "checkpoint.json", world_size);
  if (!theirs.ok()) return std::nullopt;
  proto::Config made = config;
  if (made.zero_optimization().auto_stage()) {
    made.mutable_zero_optimization()->set_stage(training.stage());
  }
  if (made.auto_micro_batch()) {
    if (theirs->train_batch_size() != made.train_batch_size()) {
      return std::nullopt;
    }
    made.set_train_micro_batch_size_per_gpu(
        theirs->train_micro_batch_size_per_gpu());
    made.set_gradient_accumulation_steps(theirs->gradient_accumulation_steps());
    made.set_auto_micro_batch(false);
  }
  proto::ActivationCheckpointing* const recompute =
      made.mutable_activation_checkpointing();
  if (recompute->policy() == "auto") {
    *recompute->mutable_units() = theirs->activation_checkpointing().units();
    recompute->set_policy(theirs->activation_checkpointing().policy());
  }
  return made;
}

absl::Status CheckCanDecide(const proto::Config& config,
                            const EngineOptions& options) {
  if (options.planned_loss != nullptr) return absl::OkStatus();
  const char* key = config.auto_micro_batch() ? "train_micro_batch_size_per_gpu"
                    : config.activation_checkpointing().policy() == "auto"
                        ? "activation_checkpointing.policy"
                        : nullptr;
  if (key == nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      key,
      ": \"auto\" needs a plan: set EngineOptions::planned_loss, or write the "
      "value"));
}

at::Device DeviceOf(const torch::nn::Module& module,
                    const EngineOptions& options) {
  if (options.device.has_value()) return *options.device;
  const std::vector<at::Tensor> parameters = module.parameters();
  return parameters.empty() ? at::Device(at::kCPU) : parameters[0].device();
}

PlanOptions PlanOptionsOf(const proto::Config& config,
                          const EngineOptions& options, int64_t memory_bytes,
                          const Communicator& comm) {
  PlanOptions plan;
  plan.world_size = comm.world_size();
  plan.memory_bytes = memory_bytes;
  // As Engine::Impl::ShareWorkingCopy.
  plan.shared_working_copy =
      comm.backend() == "shm" && !PoisonsOnFree() &&
      config.zero_optimization().stage3_max_live_parameters() > 0;
  plan.is_unit = options.is_unit;
  plan.is_leaf = options.is_leaf;
  plan.is_recomputed = options.is_recomputed;
  return plan;
}

// Rank 0's choice, on all.
absl::Status TakeRank0s(AutoChoice* choice, Communicator* comm) {
  TESSERA_ASSIGN_OR_RETURN(
      const auto configs,
      comm->AllGatherStrings(choice->config.SerializeAsString(),
                             {"what auto has become"}));
  TESSERA_ASSIGN_OR_RETURN(
      const auto reasons,
      comm->AllGatherStrings(choice->reason, {"why auto has become it"}));
  if (!choice->config.ParseFromString(configs[0])) {
    return absl::InternalError("auto: rank 0's choice cannot be read");
  }
  choice->reason = reasons[0];
  return absl::OkStatus();
}

// Null, with a warning, where the module cannot be planned.
std::shared_ptr<const PlanReport> PlanOf(const torch::nn::Module& module,
                                         const EngineOptions& options,
                                         const PlanOptions& plan,
                                         const proto::Config& config) {
  const int64_t samples = config.train_micro_batch_size_per_gpu();
  auto report = Plan(
      module, [&] { return options.planned_loss(samples); }, config, plan);
  if (report.ok()) {
    return std::make_shared<const PlanReport>(*std::move(report));
  }
  TESSERA_LOG_RANK0(WARNING)
      << "EngineOptions::planned_loss: " << report.status().message();
  return nullptr;
}

// By planning, with planned_loss.
absl::Status DecideByPlan(const torch::nn::Module& module,
                          const EngineOptions& options, const PlanOptions& plan,
                          Communicator* comm, AutoConfig* decided) {
  auto choice = ChooseAuto(module, options.planned_loss, decided->config, plan);
  TESSERA_RETURN_IF_ERROR(comm->AgreeOk(choice.status(), "auto"));
  TESSERA_RETURN_IF_ERROR(TakeRank0s(&*choice, comm));
  decided->config = choice->config;
  decided->reason = choice->reason;
  return absl::OkStatus();
}

absl::StatusOr<std::string> PlanText(const torch::nn::Module& module,
                                     const proto::Config& config,
                                     const EngineOptions& options,
                                     const PlanOptions& plan) {
  std::string text;
  proto::Config decided = config;
  if (LeavesToAuto(config)) {
    TESSERA_ASSIGN_OR_RETURN(
        const AutoChoice choice,
        ChooseAuto(module, options.planned_loss, config, plan));
    text = absl::StrCat("auto: ", choice.reason, "\n");
    decided = choice.config;
  }
  const int64_t samples = decided.train_micro_batch_size_per_gpu();
  TESSERA_ASSIGN_OR_RETURN(
      const PlanReport report,
      Plan(
          module, [&] { return options.planned_loss(samples); }, decided,
          plan));
  return absl::StrCat(text, report.ToString());
}

int LocalRanks() {
  const World* const world = World::Current();
  return world == nullptr ? 1 : world->local_world_size();
}

}  // namespace

absl::Status PlanAndEnd(const torch::nn::Module& module,
                        const proto::Config& config,
                        const EngineOptions& options, int plan_world,
                        Communicator* comm) {
  if (options.planned_loss == nullptr) {
    return absl::InvalidArgumentError(
        "--plan_world: the program does not say what a forward is: set "
        "EngineOptions::planned_loss");
  }
  proto::Config batch = config;
  // That of another number of ranks, in a configuration that is complete.
  if (batch.has_train_micro_batch_size_per_gpu())
    batch.clear_train_batch_size();
  const auto resolved = ResolveConfig(batch, plan_world);
  TESSERA_RETURN_IF_ERROR(comm->AgreeOk(resolved.status(), "configuration"));
  TESSERA_ASSIGN_OR_RETURN(
      const int64_t memory,
      AgreeOnRankMemory(resolved->sharding().memory_limit_bytes(),
                        DeviceOf(module, options), LocalRanks(), "--plan_world",
                        comm));
  PlanOptions plan = PlanOptionsOf(*resolved, options, memory, *comm);
  plan.shared_working_copy &= plan_world == comm->world_size();
  plan.world_size = plan_world;
  TESSERA_ASSIGN_OR_RETURN(const Rates rates, MeasureRates(comm));
  plan.rates = AtWorldSize(rates, plan_world);
  const auto text = PlanText(module, *resolved, options, plan);
  TESSERA_RETURN_IF_ERROR(comm->AgreeOk(text.status(), "--plan_world"));
  if (comm->rank() == 0) std::fputs(text->c_str(), stdout);
  std::fflush(stdout);
  TESSERA_RETURN_IF_ERROR(comm->Barrier("--plan_world"));
  Shutdown();
  std::exit(0);
}

absl::StatusOr<AutoConfig> DecideAuto(const torch::nn::Module& module,
                                      const proto::Config& config,
                                      const EngineOptions& options,
                                      Communicator* comm) {
  TESSERA_RETURN_IF_ERROR(CheckSame(
      absl::StrCat(options.planned_loss == nullptr ? "without" : "with",
                   " planned_loss, resume_from '", options.resume_from, "'"),
      "way to resolve auto", comm));
  AutoConfig decided;
  decided.config = config;
  const bool by_policy = config.activation_checkpointing().policy() == "auto";
  if (LeavesToAuto(config)) {
    TESSERA_ASSIGN_OR_RETURN(const auto training,
                             FindTraining(options.resume_from, comm));
    if (training.has_value()) {
      const auto as_trained = AsTrained(config, *training, comm->world_size());
      if (as_trained.has_value()) {
        decided.config = *as_trained;
        decided.reason = absl::StrCat("as the checkpoint in ",
                                      options.resume_from, " was trained");
      }
    }
  }
  const bool left = LeavesToAuto(decided.config);
  if (left) {
    TESSERA_RETURN_IF_ERROR(
        comm->AgreeOk(CheckCanDecide(decided.config, options), "auto"));
  }
  if (options.planned_loss != nullptr) {
    const at::Device device = DeviceOf(module, options);
    TESSERA_ASSIGN_OR_RETURN(
        const int64_t memory,
        AgreeOnRankMemory(config.sharding().memory_limit_bytes(), device,
                          LocalRanks(), "auto", comm));
    PlanOptions plan = PlanOptionsOf(config, options, memory, *comm);
    if (left && device.is_cpu()) {
      TESSERA_ASSIGN_OR_RETURN(plan.rates, MeasureRates(comm));
    }
    if (left) {
      TESSERA_RETURN_IF_ERROR(
          DecideByPlan(module, options, plan, comm, &decided));
    }
    decided.plan = PlanOf(module, options, plan, decided.config);
  }
  decided.recomputes =
      !by_policy || !decided.config.activation_checkpointing().units().empty();
  if (!decided.reason.empty() && comm->rank() == 0) {
    TESSERA_LOG(INFO) << "auto: " << decided.reason;
  }
  return decided;
}

}  // namespace tessera
