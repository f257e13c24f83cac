#include "engine/plan/plan.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/memory/available_memory.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "config/config.h"
#include "engine/parts/settings.h"
#include "engine/plan/model_trace.h"
#include "engine/plan/planned_flat.h"
#include "engine/plan/step_replay.h"
#include "torch/nn/module.h"

namespace tessera {
namespace {

// As stage "auto" has it: nine tenths of what is there, which ranks of one host
// share.
absl::StatusOr<int64_t> MemoryOfRank(const proto::Config& config,
                                     const PlanOptions& options) {
  if (options.memory_bytes > 0) return options.memory_bytes;
  if (config.sharding().memory_limit_bytes() > 0) {
    return config.sharding().memory_limit_bytes();
  }
  TESSERA_ASSIGN_OR_RETURN(const int64_t bytes, AvailableHostMemory());
  return bytes / 10 * 9 /
         (options.shared_working_copy ? options.world_size : 1);
}

PlanMoment MomentOf(const Trace& trace, int64_t event) {
  PlanMoment moment;
  const TraceEvent& at = trace.events[static_cast<size_t>(event)];
  moment.backward = at.backward;
  if (at.unit >= 0) {
    const std::string& name =
        trace.parameters[static_cast<size_t>(at.unit)].name;
    moment.module = name.substr(0, std::min(name.rfind('.'), name.size()));
  }
  // Results are allocated before their operator's event.
  for (auto i = static_cast<size_t>(event); i < trace.events.size(); ++i) {
    if (trace.events[i].kind != TraceEvent::Kind::kOperator) continue;
    moment.op = trace.operators[static_cast<size_t>(trace.events[i].what)];
    break;
  }
  return moment;
}

// What a ring sends of `bytes`, once around.
int64_t Around(int64_t bytes, int ranks) { return bytes / ranks * (ranks - 1); }

absl::StatusOr<StagePlan> PlanStage(const ModelTrace& model, int stage,
                                    const proto::Config& config,
                                    Settings settings,
                                    const PlanOptions& options) {
  SetOverlap(config.zero_optimization(), stage, &settings);
  settings.flats.sharded_parameters = stage == 3;
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<FlatPlan> flats,
      SplitFlats(model.partition.units, model.trainable, settings.flats));
  std::vector<PlannedFlat> planned;
  int64_t published = 0;
  for (const FlatPlan& flat : flats) {
    planned.push_back(PlannedFlatOf(settings, flat, stage));
    const PlannedFlat& made = planned.back();
    if (made.trained && made.sharded_optimizer && !made.sharded_parameters) {
      published += made.whole_numel * made.working_bytes;
    }
  }
  const std::vector<int> flat_of = PlacesIn(flats, model.trace);
  StepReplayOptions replay;
  replay.schedule = settings.schedule;
  replay.gradients = settings.gradients;
  replay.world_size = options.world_size;
  replay.micro_batches = config.gradient_accumulation_steps();
  replay.accumulates_locally = settings.accumulate_locally;
  replay.has_optimizer = settings.adamw.has_value();
  replay.shares_working_copy =
      stage == 3 && options.world_size > 1 &&
      settings.shared_working_copy != "off" &&
      (options.shared_working_copy || settings.shared_working_copy == "on");
  replay.buffer_bytes = model.buffer_bytes;
  if (model.recomputes) replay.recomputed = model.recomputed;
  const StepReplayResult result =
      ReplayStep(model.trace, planned, flat_of, replay);
  StagePlan plan;
  plan.stage = stage;
  plan.between_steps = result.between_steps;
  plan.peak = result.peak;
  plan.at = MomentOf(model.trace, result.peak_event);
  if (!model.recomputes) replay.recomputed = model.automatic;
  plan.recomputed_peak = ReplayStep(model.trace, planned, flat_of, replay).peak;
  // An all-reduce goes around twice, a reduce-scatter and a gather once.
  const int ranks = stage == 0 ? options.world_size : settings.shard_group_size;
  plan.sent_bytes = Around(result.gathered_bytes + published, ranks) +
                    Around(result.reduced_bytes, ranks) * (stage == 0 ? 2 : 1);
  plan.units = static_cast<int64_t>(planned.size());
  return plan;
}

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
  const absl::Time start = absl::Now();
  PlanReport report;
  report.base_bytes = ResidentBytes().value_or(0);
  report.world_size = options.world_size;
  TESSERA_ASSIGN_OR_RETURN(const proto::Config resolved,
                           ResolveConfig(config, options.world_size));
  TESSERA_RETURN_IF_ERROR(CheckRunnable(resolved));
  TESSERA_ASSIGN_OR_RETURN(report.memory_bytes,
                           MemoryOfRank(resolved, options));
  EngineOptions engine;
  engine.is_unit = options.is_unit;
  engine.is_leaf = options.is_leaf;
  engine.is_recomputed = options.is_recomputed;
  Settings settings = SettingsOf(resolved, engine, options.world_size);
  settings.flats.working_dtype = [&settings](const NamedParameter& p) {
    return WorkingDtype(settings, p);
  };
  TESSERA_ASSIGN_OR_RETURN(const ModelTrace model,
                           TraceModel(module, loss, settings, options.tracer));
  for (int stage = 0; stage <= 3; ++stage) {
    TESSERA_ASSIGN_OR_RETURN(
        StagePlan plan, PlanStage(model, stage, resolved, settings, options));
    report.stages.push_back(std::move(plan));
  }
  const proto::ZeroOptimization& zero = resolved.zero_optimization();
  report.configured_stage = zero.auto_stage() ? -1 : zero.stage();
  for (const at::Tensor& p : module.parameters()) {
    report.parameters += p.numel();
    if (p.requires_grad()) report.trained += p.numel();
  }
  report.buffer_bytes = model.buffer_bytes;
  report.micro_batch = resolved.train_micro_batch_size_per_gpu();
  report.saved_bytes = model.trace.saved_bytes;
  report.flops = model.trace.flops();
  FillFormula(model, report.stages[0], &report);
  report.seconds = absl::ToDoubleSeconds(absl::Now() - start);
  return report;
}

}  // namespace tessera
