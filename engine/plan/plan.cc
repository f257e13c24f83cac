#include "engine/plan/plan.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/memory/memory.h"
#include "base/monotonic.h"
#include "base/status.h"
#include "comm/backend_table.h"
#include "config/config.h"
#include "engine/build/custom_checks.h"
#include "engine/build/settings.h"
#include "engine/plan/auto_choice.h"
#include "engine/plan/model_trace.h"
#include "engine/plan/stage_plan.h"
#include "torch/nn/module.h"

namespace tessera {
namespace {

// The textbook's: with all states whole, of one rank.
void FillFormula(const ModelTrace& model, const StagePlan& stage,
                 PlanReport* report) {
  report->formula.model = stage.between_steps[PlanKind::kParameters] +
                          stage.between_steps[PlanKind::kMasters];
  report->formula.optimizer = stage.between_steps[PlanKind::kOptimizer];
  for (const TracedParameter& p : model.trace.parameters) {
    if (p.trained) report->formula.gradients += p.bytes;
  }
  report->formula.activations = model.trace.saved_bytes;
}

// Where no backend is named and no group exists, the backend is that of ranks
// on one host, or of ranks on a host each.
void FillCommunication(const proto::Config& config, const PlanOptions& options,
                       PlanReport* report) {
  const proto::Communication& communication = config.communication();
  report->backend = communication.backend() != "auto" ? communication.backend()
                                                      : options.backend;
  if (report->backend.empty()) {
    report->backend = std::string(
        BackendByMemory(options.world_size,
                        options.shared_working_copy ? 1 : options.world_size));
  }
  const int shard_group = config.sharding().shard_group_size();
  const bool has_replicas = shard_group > 0 && shard_group < options.world_size;
  // All ranks; a shard group and its replicas.
  for (const int ranks :
       {options.world_size, has_replicas ? shard_group : 1,
        has_replicas ? options.world_size / shard_group : 1}) {
    const TransportMemory memory = MemoryOfTransport(
        report->backend, ranks,
        {communication.nccl().begin(), communication.nccl().end()});
    report->communication_bytes += memory.bytes;
    report->communication_is_estimated |= memory.estimated;
  }
}

}  // namespace

int PlanReport::lowest_that_fits() const {
  for (const StagePlan& stage : stages) {
    if (stage.peak.total() <= memory_bytes) return stage.stage;
  }
  return -1;
}

absl::StatusOr<PlanReport> Plan(const torch::nn::Module& module,
                                const std::function<at::Tensor()>& loss,
                                const proto::Config& config,
                                const PlanOptions& options) {
  const absl::Duration start = MonotonicNow();
  PlanReport report;
  report.base_bytes = ResidentBytes().value_or(0);
  report.world_size = options.world_size;
  TESSERA_ASSIGN_OR_RETURN(const proto::Config resolved,
                           ResolveConfig(config, options.world_size));
  TESSERA_RETURN_IF_ERROR(CheckRunnable(resolved));
  if (TensorRanksOf(resolved) > 1) {
    return absl::UnimplementedError(absl::StrCat(
        "Plan: tensor_parallel.autotp_size ", TensorRanksOf(resolved),
        ": plans know whole layers alone; plan with 1, which is an upper bound "
        "of memory"));
  }
  if (SequenceRanksOf(resolved) > 1) {
    return absl::UnimplementedError(absl::StrCat(
        "Plan: sequence_parallel_size ", SequenceRanksOf(resolved),
        ": plans know whole sequences alone; plan with 1, which is an upper "
        "bound of memory"));
  }
  if (PipelineRanksOf(resolved) > 1) {
    return absl::UnimplementedError(absl::StrCat(
        "Plan: pipeline.stages ", PipelineRanksOf(resolved),
        ": plans know models of one stage alone; plan with 1, which is an "
        "upper bound of memory, or read what Engine::Create logs"));
  }
  TESSERA_RETURN_IF_ERROR(CheckCustom(resolved, options.optimizer));
  if (const char* const key = KeyThatPlansDecide(resolved)) {
    return absl::InvalidArgumentError(
        absl::StrCat("Plan: ", key,
                     " is \"auto\", which a plan of each decides: see "
                     "ChooseAuto, or write the value"));
  }
  TESSERA_ASSIGN_OR_RETURN(report.memory_bytes,
                           MemoryOfRank(resolved, options));
  const Settings settings = PlanSettings(resolved, options);
  TESSERA_ASSIGN_OR_RETURN(
      const ModelTrace model,
      TraceModel(module, loss, resolved.optimizer(), settings, options));
  for (int stage = 0; stage <= 3; ++stage) {
    TESSERA_ASSIGN_OR_RETURN(StagePlan plan,
                             PlanStage(model, stage, Recomputed::kConfigured,
                                       resolved, settings, options));
    plan.recomputed_peak = plan.peak;
    if (!model.recomputes) {
      TESSERA_ASSIGN_OR_RETURN(const StagePlan other,
                               PlanStage(model, stage, Recomputed::kAutomatic,
                                         resolved, settings, options));
      plan.recomputed_peak = other.peak;
    }
    report.stages.push_back(std::move(plan));
  }
  const proto::ZeroOptimization& zero = resolved.zero_optimization();
  report.configured_stage = zero.auto_stage() ? -1 : zero.stage();
  for (const at::Tensor& p : module.parameters()) {
    report.parameters += p.numel();
  }
  for (const UnitPlan& unit : model.partition.units) {
    for (const NamedParameter& p : unit.parameters) {
      const bool trained = model.trainable[static_cast<size_t>(p.index)];
      report.trained += trained ? p.tensor.numel() : 0;
    }
  }
  report.buffer_bytes = model.buffer_bytes;
  report.micro_batch = resolved.train_micro_batch_size_per_gpu();
  report.samples = resolved.train_batch_size();
  report.rates = options.rates;
  report.saved_bytes = model.trace.saved_bytes;
  report.flops = model.trace.flops();
  FillCommunication(resolved, options, &report);
  FillFormula(model, report.stages[0], &report);
  report.seconds = absl::ToDoubleSeconds(MonotonicNow() - start);
  return report;
}

}  // namespace tessera
