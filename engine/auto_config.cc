#include "engine/auto_config.h"

#include <algorithm>
#include <cstdio>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "base/system/process_end.h"
#include "base/torch_guard.h"
#include "checkpoint/disk/folder.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "checkpoint/format/step_folders.h"
#include "checkpoint/local_folders.h"
#include "comm/all_gather_values.h"
#include "comm/capabilities.h"
#include "comm/world/world.h"
#include "config/config.h"
#include "config/config_report.h"
#include "engine/build/initial_sync.h"
#include "engine/build/rank_memory.h"
#include "engine/build/settings.h"
#include "engine/plan/auto_choice.h"
#include "engine/plan/plan.h"
#include "engine/plan/rates.h"
#include "torch/nn/module.h"

namespace tessera {
namespace {

constexpr char kResumeFrom[] = "EngineOptions::resume_from";

// The one that `dir` is, or the first of `steps` that can be read; nothing if
// there is none.
absl::StatusOr<std::optional<proto::CheckpointManifest>> FindManifest(
    const std::string& dir, const std::vector<RunStep>& steps) {
  const auto read =
      [](const std::string& path) -> absl::StatusOr<proto::CheckpointManifest> {
    TESSERA_ASSIGN_OR_RETURN(const Folder folder,
                             Folder::Open(path, FileSystem::Real()));
    return ReadManifest(folder);
  };
  auto manifest = read(dir);
  if (manifest.ok()) return *std::move(manifest);
  if (!absl::IsNotFound(manifest.status())) return manifest.status();
  for (const RunStep& one : steps) {
    manifest = read(absl::StrCat(dir, "/", StepFolderName(one.step)));
    if (manifest.ok()) return *std::move(manifest);
    // Removed or damaged since it was listed: the one before counts.
    if (!absl::IsNotFound(manifest.status()) &&
        !absl::IsDataLoss(manifest.status())) {
      return manifest.status();
    }
  }
  return std::nullopt;
}

// Reads how the newest checkpoint was trained; nullopt where there is none.
// Rank 0 reads it, or all ranks if each host has a folder of its own, since a
// host may be new. COLLECTIVE.
absl::StatusOr<std::optional<proto::CheckpointTraining>> FindTraining(
    const std::string& dir, bool node_local, Communicator* comm) {
  if (dir.empty()) return std::nullopt;
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<RunStep> steps,
      ListRunSteps(dir, node_local ? FolderHolds::kPart : FolderHolds::kAll,
                   kResumeFrom, comm));
  absl::StatusOr<std::optional<proto::CheckpointManifest>> found = std::nullopt;
  if (comm->rank() == 0 || node_local) found = FindManifest(dir, steps);
  TESSERA_RETURN_IF_ERROR(comm->AgreeOk(found.status(), kResumeFrom));
  std::string text;
  int64_t saved = -1;
  if (found->has_value()) {
    text = (*found)->training().SerializeAsString();
    saved = (*found)->saved_unix_micros();
  }
  TESSERA_ASSIGN_OR_RETURN(
      const auto all,
      AllGatherValueAndText(comm, saved, text,
                            {"how the checkpoint was trained"}));
  const auto newest = std::max_element(
      all.begin(), all.end(),
      [](const auto& a, const auto& b) { return a.value < b.value; });
  proto::CheckpointTraining training;
  if (newest->value < 0 || !training.ParseFromString(newest->text)) {
    return std::nullopt;
  }
  return training;
}

// `config`, with what it leaves to auto as `training` has it.
// FailedPrecondition says why it cannot.
absl::StatusOr<proto::Config> AsTrained(
    const proto::Config& config, const proto::CheckpointTraining& training,
    int world_size) {
  if (training.world_size() != world_size) {
    return absl::FailedPreconditionError(absl::StrCat(
        "it had ", training.world_size(), " ranks, not ", world_size));
  }
  const int tensor_ranks = std::max(training.tensor_ranks(), 1);
  if (tensor_ranks != TensorRanksOf(config)) {
    return absl::FailedPreconditionError(
        absl::StrCat("it had tensor_parallel.autotp_size ", tensor_ranks,
                     ", not ", TensorRanksOf(config)));
  }
  const int sequence_ranks = std::max(training.sequence_ranks(), 1);
  if (sequence_ranks != SequenceRanksOf(config)) {
    return absl::FailedPreconditionError(
        absl::StrCat("it had sequence_parallel_size ", sequence_ranks, ", not ",
                     SequenceRanksOf(config)));
  }
  const int stages = std::max(training.pipeline_ranks(), 1);
  if (stages != PipelineRanksOf(config)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "it had pipeline.stages ", stages, ", not ", PipelineRanksOf(config)));
  }
  proto::Config made = config;
  proto::ZeroOptimization* const zero = made.mutable_zero_optimization();
  if (zero->auto_stage()) zero->set_stage(training.stage());
  if (!LeavesToAuto(made)) return ResolveConfig(made, world_size);
  // That of another version may have keys that this one does not know.
  TESSERA_ASSIGN_OR_RETURN(
      const ConfigReport report,
      ReadConfig(training.config(), "checkpoint.json", world_size, {},
                 /*ignore_unknown=*/true));
  if (!report.faults.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("its configuration cannot be read: ",
                     FormatFault(report.faults[0], "checkpoint.json")));
  }
  const proto::Config& theirs = report.config;
  if (made.auto_micro_batch() &&
      theirs.train_batch_size() != made.train_batch_size()) {
    return absl::FailedPreconditionError(
        absl::StrCat("its train_batch_size was ", theirs.train_batch_size(),
                     ", not ", made.train_batch_size()));
  }
  const proto::Config& batch = made.auto_micro_batch() ? theirs : made;
  const auto& recompute = theirs.activation_checkpointing();
  AutoCandidate way;
  way.stage = zero->stage();
  way.micro_batch = batch.train_micro_batch_size_per_gpu();
  way.micro_batches = batch.gradient_accumulation_steps();
  if (made.activation_checkpointing().policy() == "auto") {
    *made.mutable_activation_checkpointing()->mutable_units() =
        recompute.units();
    if (recompute.units_size() > 0) way.policy = recompute.policy();
  }
  const auto& states = theirs.zero_optimization().offload_optimizer();
  if (zero->offload_optimizer().device() == "auto") {
    way.tiers.states = states.device();
    way.tiers.ratio = states.ratio();
  }
  const auto& parameters = theirs.zero_optimization().offload_param();
  if (zero->offload_param().device() == "auto") {
    way.tiers.parameters = parameters.device();
    way.tiers.max_in_cpu = parameters.max_in_cpu();
  }
  return ConfigOfWay(made, way, world_size);
}

absl::Status CheckCanDecide(const proto::Config& config,
                            const EngineOptions& options) {
  const char* const key = config.auto_micro_batch()
                              ? "train_micro_batch_size_per_gpu"
                              : KeyThatPlansDecide(config);
  if (PipelineRanksOf(config) > 1) {
    return absl::UnimplementedError(absl::StrCat(
        "pipeline.stages ", PipelineRanksOf(config),
        ": plans know models of one stage alone, so nothing is found for ",
        key != nullptr ? key : "zero_optimization.stage",
        " \"auto\": write the value"));
  }
  if (options.planned_loss != nullptr || key == nullptr) {
    return absl::OkStatus();
  }
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

// Returns what plans are made of for the group. `measures`: with the rates of
// its ranks, and of their disk, where one is named. `where` is for messages.
// COLLECTIVE.
absl::StatusOr<PlanOptions> PlanOptionsOf(const torch::nn::Module& module,
                                          const proto::Config& config,
                                          const EngineOptions& options,
                                          bool measures,
                                          absl::string_view where,
                                          Communicator* comm) {
  const at::Device device = DeviceOf(module, options);
  PlanOptions plan;
  TESSERA_ASSIGN_OR_RETURN(plan.memory_bytes,
                           AgreeOnMemory(module, config, device, where, comm));
  plan.world_size = comm->world_size();
  plan.backend = std::string(comm->backend());
  // As Engine::Impl::ShareWorkingCopy.
  plan.shared_working_copy =
      comm->capabilities().shared_memory && !PoisonsOnFree() &&
      config.zero_optimization().stage3_max_live_parameters() > 0;
  plan.on_cpu = device.is_cpu();
  plan.is_unit = options.is_unit;
  plan.is_leaf = options.is_leaf;
  plan.is_recomputed = options.is_recomputed;
  plan.param_groups = options.param_groups;
  plan.optimizer = options.optimizer;
  if (!measures || !plan.on_cpu) return plan;
  TESSERA_ASSIGN_OR_RETURN(plan.rates, MeasureRates(comm));
  if (const auto disk = DiskOf(config)) {
    TESSERA_RETURN_IF_ERROR(MeasureDisk(*disk, comm, &*plan.rates));
  }
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
  auto report = CatchTorch("plan", [&] {
    return Plan(
        module, [&] { return options.planned_loss(samples); }, config, plan);
  });
  if (report.ok()) {
    return std::make_shared<const PlanReport>(*std::move(report));
  }
  TESSERA_LOG_RANK0(WARNING)
      << "EngineOptions::planned_loss: " << report.status().message();
  return nullptr;
}

// As the checkpoint that the run goes on from.
absl::Status DecideAsTrained(const EngineOptions& options, Communicator* comm,
                             AutoConfig* decided) {
  TESSERA_ASSIGN_OR_RETURN(
      const auto training,
      FindTraining(options.resume_from,
                   decided->config.checkpoint().use_node_local_storage(),
                   comm));
  if (!training.has_value()) return absl::OkStatus();
  const auto as_trained =
      AsTrained(decided->config, *training, comm->world_size());
  if (as_trained.ok()) {
    decided->config = *as_trained;
    decided->reason = absl::StrCat("as the checkpoint in ", options.resume_from,
                                   " was trained");
  } else if (comm->rank() == 0) {
    TESSERA_LOG(WARNING) << "auto: not as the checkpoint in "
                         << options.resume_from
                         << " was trained: " << as_trained.status().message();
  }
  return absl::OkStatus();
}

// By planning, with planned_loss; `left`: something is left to auto.
absl::Status DecideByPlan(const torch::nn::Module& module,
                          const EngineOptions& options, bool left,
                          Communicator* comm, AutoConfig* decided) {
  TESSERA_ASSIGN_OR_RETURN(const PlanOptions plan,
                           PlanOptionsOf(module, decided->config, options,
                                         /*measures=*/left, "auto", comm));
  if (left) {
    auto choice = CatchTorch("auto", [&] {
      return ChooseAuto(module, options.planned_loss, decided->config, plan);
    });
    TESSERA_RETURN_IF_ERROR(comm->AgreeOk(choice.status(), "auto"));
    TESSERA_RETURN_IF_ERROR(TakeRank0s(&*choice, comm));
    decided->config = choice->config;
    decided->reason = choice->reason;
  }
  decided->plan = PlanOf(module, options, plan, decided->config);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<int64_t> AgreeOnMemory(const torch::nn::Module& module,
                                      const proto::Config& config,
                                      at::Device device,
                                      absl::string_view where,
                                      Communicator* comm) {
  const World* const world = World::Current();
  return AgreeOnRankMemory(config.sharding().memory_limit_bytes(), device,
                           world == nullptr ? 1 : world->local_world_size(),
                           module, where, comm);
}

absl::Status PlanAndEnd(const torch::nn::Module& module,
                        const proto::Config& config,
                        const EngineOptions& options, int plan_world,
                        Communicator* comm) {
  auto resolved = ResolveConfig(config, plan_world);
  if (!resolved.ok() && config.has_train_micro_batch_size_per_gpu()) {
    // Complete for another number of ranks.
    proto::Config batch = config;
    batch.clear_train_batch_size();
    resolved = ResolveConfig(batch, plan_world);
  }
  if (options.planned_loss == nullptr) {
    resolved = absl::InvalidArgumentError(
        "--plan_world: the program does not say what a forward is: set "
        "EngineOptions::planned_loss");
  }
  TESSERA_RETURN_IF_ERROR(comm->AgreeOk(resolved.status(), "--plan_world"));
  TESSERA_ASSIGN_OR_RETURN(
      PlanOptions plan, PlanOptionsOf(module, *resolved, options,
                                      /*measures=*/true, "--plan_world", comm));
  if (plan_world != comm->world_size()) {  // another group than this one
    plan.shared_working_copy = false;
    plan.backend.clear();
  }
  plan.world_size = plan_world;
  if (plan.rates.has_value()) {
    plan.rates = AtWorldSize(*plan.rates, plan_world);
  }
  const auto text = CatchTorch("--plan_world", [&] {
    return PlanText(module, options.planned_loss, *resolved, plan);
  });
  TESSERA_RETURN_IF_ERROR(comm->AgreeOk(text.status(), "--plan_world"));
  if (comm->rank() == 0) std::fputs(text->c_str(), stdout);
  std::fflush(stdout);
  TESSERA_RETURN_IF_ERROR(comm->Barrier("--plan_world"));
  Shutdown();
  EndProcess(ProcessEnd::kPlanned, 0);
  return absl::CancelledError("--plan_world: the plan was printed");
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
  if (LeavesToAuto(config)) {
    TESSERA_RETURN_IF_ERROR(DecideAsTrained(options, comm, &decided));
  }
  const bool left = LeavesToAuto(decided.config);
  if (left) {
    TESSERA_RETURN_IF_ERROR(
        comm->AgreeOk(CheckCanDecide(decided.config, options), "auto"));
  }
  const bool plans =
      left || (options.plan == nullptr && TensorRanksOf(config) == 1 &&
               SequenceRanksOf(config) == 1 && PipelineRanksOf(config) == 1);
  if (options.planned_loss != nullptr && plans) {
    TESSERA_RETURN_IF_ERROR(
        DecideByPlan(module, options, left, comm, &decided));
  }
  const bool by_policy = config.activation_checkpointing().policy() == "auto";
  decided.recomputes =
      !by_policy || !decided.config.activation_checkpointing().units().empty();
  if (!decided.reason.empty() && comm->rank() == 0) {
    TESSERA_LOG(INFO) << "auto: " << decided.reason;
  }
  return decided;
}

}  // namespace tessera
