#include "engine/divide/pipeline_stages.h"

#include <algorithm>
#include <utility>

#include "ATen/ops/empty.h"
#include "ATen/ops/zeros.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"
#include "base/torch/storage_access.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "config/config.h"
#include "optim/algorithms/algorithm.h"
#include "optim/kernels/shaped_states.h"
#include "parallel/pipeline/staged_storages.h"
#include "parallel/pipeline/traced_costs.h"
#include "sharding/partition/storage_groups.h"
#include "sharding/trace/trace.h"
#include "torch/nn/module.h"

namespace tessera {
namespace {

constexpr char kStagesKey[] = "pipeline.stages";

std::vector<const NamedParameter*> InOrder(const std::vector<UnitPlan>& units) {
  std::vector<const NamedParameter*> all;
  for (const UnitPlan& unit : units) {
    for (const NamedParameter& p : unit.parameters) all.push_back(&p);
  }
  std::sort(all.begin(), all.end(),
            [](auto* a, auto* b) { return a->index < b->index; });
  return all;
}

absl::Status Refuse(const proto::Config& config, absl::string_view what) {
  return absl::UnimplementedError(
      absl::StrCat(kStagesKey, " ", PipelineRanksOf(config), ": ", what));
}

// What this version cannot do over stages.
absl::Status CheckComposes(const proto::Config& config,
                           const Settings& settings,
                           const ParameterGroups& groups,
                           const std::vector<const NamedParameter*>& all) {
  if (PipelineRanksOf(config) > kMaxStages) {
    return Refuse(config, absl::StrCat("at most ", kMaxStages, " stages"));
  }
  if (!settings.step.adaptive_clipping.empty()) {
    return Refuse(config, "adaptive_gradient_clipping: use gradient_clipping");
  }
  if (settings.gradients.uses_up) {
    return Refuse(
        config, "sharding.step_in_backward: a step has several micro-batches");
  }
  for (const NamedParameter* p : all) {
    if (p->tensor.is_cpu()) continue;
    return Refuse(config, absl::StrCat("parameter '", p->name, "' is on ",
                                       p->tensor.device().str(),
                                       ": modules on the CPU alone"));
  }
  if (!settings.optimizer.has_value()) return absl::OkStatus();
  for (const OptimizerOptions& group : groups.options) {
    const AlgorithmRow& row = RowOf(group.algorithm);
    if (!HasShapedStates(row.formula(group)) &&
        group.algorithm != Algorithm::kCustom &&
        group.algorithm != Algorithm::kCustomOfRate) {
      continue;
    }
    return Refuse(config, absl::StrCat("the optimizer ", row.name,
                                       " needs all parameters on each rank; "
                                       "use another one, as AdamW"));
  }
  return absl::OkStatus();
}

PipelinePartition PartitionOf(absl::string_view word) {
  if (word == "parameters") return PipelinePartition::kParameters;
  return word == "uniform" ? PipelinePartition::kUniform
                           : PipelinePartition::kBest;
}

// Memory goes to a stage with all that is in it.
absl::Status CheckMemory(const std::vector<const NamedParameter*>& all) {
  std::vector<NamedParameter> copies;
  for (const NamedParameter* p : all) copies.push_back(*p);
  for (const StorageGroup& group : GroupByStorage(copies).groups) {
    const NamedParameter& p = copies[static_cast<size_t>(group.members[0])];
    const auto numel =
        static_cast<int64_t>(p.tensor.storage().nbytes() / p.tensor.itemsize());
    if (group.members.size() == 1 && p.tensor.numel() == numel) continue;
    return absl::UnimplementedError(absl::StrCat(
        kStagesKey, ": parameter '", p.name,
        "' is a part of memory that has more; give it memory of its own "
        "(clone)"));
  }
  return absl::OkStatus();
}

}  // namespace

PipelineSchedule ScheduleOf(const proto::Config& config) {
  return config.pipeline().schedule() == "gpipe" ? PipelineSchedule::kGPipe
                                                 : PipelineSchedule::k1F1B;
}

absl::StatusOr<PipelinePlan> ChooseStages(const proto::Config& config,
                                          const Settings& settings,
                                          const ParameterGroups& groups,
                                          const EngineOptions& options,
                                          const torch::nn::Module& module,
                                          const std::vector<UnitPlan>& units) {
  const std::vector<const NamedParameter*> all = InOrder(units);
  TESSERA_RETURN_IF_ERROR(CheckComposes(config, settings, groups, all));
  TESSERA_RETURN_IF_ERROR(CheckMemory(all));
  std::vector<PipelineParameter> parameters;
  for (const NamedParameter* p : all) {
    parameters.push_back({p->name, LayerOf(p->name), p->tensor.numel(), 0});
  }
  if (options.planned_loss != nullptr) {
    const int64_t samples = config.train_micro_batch_size_per_gpu();
    TESSERA_ASSIGN_OR_RETURN(const Trace trace, TakeTrace(module, [&] {
                               return options.planned_loss(samples);
                             }));
    parameters = CostsOf(trace);
  }
  const proto::Pipeline& section = config.pipeline();
  TESSERA_ASSIGN_OR_RETURN(
      PipelinePlan plan,
      PlanStages(
          parameters, PipelineRanksOf(config), PartitionOf(section.partition()),
          {section.split_points().begin(), section.split_points().end()}));
  // By number of the parameter.
  absl::flat_hash_map<std::string, int> stage_of;
  for (size_t i = 0; i < parameters.size(); ++i) {
    stage_of[parameters[i].name] = plan.stage[i];
  }
  plan.stage.clear();
  for (const NamedParameter* p : all) plan.stage.push_back(stage_of[p->name]);
  return plan;
}

absl::Status PipelineStages::Divide(
    const std::vector<int>& stages,
    const std::shared_ptr<Communicator>& pipeline,
    const std::function<at::ScalarType(const NamedParameter&)>& dtype,
    std::vector<UnitPlan>* units) {
  pipeline_ = pipeline;
  const int mine = pipeline->rank();
  return CatchTorch(kStagesKey, [&] {
    TorchScope scope;
    for (UnitPlan& unit : *units) {
      for (NamedParameter& p : unit.parameters) {
        const int home = stages[static_cast<size_t>(p.index)];
        const at::Tensor whole = p.tensor;
        p.part = PartOfWhole{};
        p.part->sizes = whole.sizes().vec();
        p.part->strides = whole.strides().vec();
        p.part->index = mine;
        p.part->parts = pipeline->world_size();
        p.part->home = home;
        p.part->whole = whole;
        staged_.push_back({whole, p.name, home});
        dtypes_.push_back(whole.scalar_type());
        if (home == mine) continue;
        p.counted_elsewhere = true;
        p.tensor = at::zeros(std::vector<int64_t>(whole.sizes().size(), 1),
                             whole.options());
        p.tensor.set_requires_grad(whole.requires_grad());
        const at::ScalarType computed = dtype(p);
        const size_t bytes =
            static_cast<size_t>(whole.numel()) * c10::elementSize(computed);
        SetStorage(
            whole,
            c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
                AbsentStorage(bytes, whole.device()).unsafeGetStorageImpl()),
            computed);
      }
    }
  });
}

absl::Status PipelineStages::GiveBack() {
  while (!staged_.empty()) {
    const StagedParameter& p = staged_.back();
    TESSERA_RETURN_IF_ERROR(CatchTorch(p.name, [&]() -> absl::Status {
      TorchScope scope;
      const bool here = p.home == pipeline_->rank();
      at::Tensor values = here ? p.tensor.contiguous()
                               : at::empty(p.tensor.sizes(), dtypes_.back());
      TESSERA_RETURN_IF_ERROR(
          pipeline_
              ->Broadcast(values.view({-1}), p.home, {"parameter of a stage"})
              .Wait());
      if (here) return absl::OkStatus();
      at::Tensor whole = at::empty_strided(p.tensor.sizes(), p.tensor.strides(),
                                           values.options());
      whole.copy_(values);
      SetStorage(p.tensor,
                 c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
                     whole.storage().unsafeGetStorageImpl()),
                 dtypes_.back());
      return absl::OkStatus();
    }));
    staged_.pop_back();
    dtypes_.pop_back();
  }
  return absl::OkStatus();
}

}  // namespace tessera
