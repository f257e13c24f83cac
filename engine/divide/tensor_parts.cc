#include "engine/divide/tensor_parts.h"

#include <algorithm>
#include <string>
#include <tuple>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/log.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "config/config.h"
#include "optim/algorithms/algorithm.h"
#include "optim/kernels/shaped_states.h"
#include "parallel/plan/tensor_plan.h"
#include "parallel/tensor/placed.h"
#include "sharding/partition/storage_groups.h"
#include "torch/nn/module.h"

namespace tessera {
namespace {

constexpr char kWhat[] = "tensor parallelism";
constexpr char kKey[] = "tensor_parallel.autotp_size";

struct Cut {
  NamedParameter* parameter;
  TensorPlacement placement;
};

// Returns how many parameters lie in the storage of each, by index.
std::vector<size_t> SharersOf(const std::vector<UnitPlan>& units) {
  std::vector<NamedParameter> all;
  for (const UnitPlan& unit : units) {
    all.insert(all.end(), unit.parameters.begin(), unit.parameters.end());
  }
  const StorageGroups groups = GroupByStorage(all);
  std::vector<size_t> sharers(all.size());
  for (size_t i = 0; i < all.size(); ++i) {
    sharers[static_cast<size_t>(all[i].index)] =
        groups.groups[static_cast<size_t>(groups.of[i])].members.size();
  }
  return sharers;
}

absl::StatusOr<std::vector<Cut>> Find(const std::vector<TensorCut>& cuts,
                                      int ranks, std::vector<UnitPlan>* units) {
  absl::flat_hash_map<std::string, NamedParameter*> by_name;
  for (UnitPlan& unit : *units) {
    for (NamedParameter& p : unit.parameters) by_name[p.name] = &p;
  }
  const std::vector<size_t> sharers = SharersOf(*units);
  std::vector<Cut> found;
  for (const auto& [name, dim, groups] : cuts) {
    const auto it = by_name.find(name);
    if (it == by_name.end()) {
      return absl::InvalidArgumentError(absl::StrCat(
          kWhat, ": there is no parameter '", name,
          "' to divide (a tied one goes by its first name; ignored ones cannot "
          "be divided)"));
    }
    const at::Tensor& whole = it->second->tensor;
    const std::string what = absl::StrCat(
        kWhat, ": parameter '", name, "' [", absl::StrJoin(whole.sizes(), ", "),
        "] cannot be divided along dimension ", dim, " over ", ranks, " ranks",
        groups == 1 ? "" : absl::StrCat(" in ", groups, " groups"), ": ");
    if (dim < 0 || dim >= whole.dim()) {
      return absl::InvalidArgumentError(absl::StrCat(
          what, "expected a dimension from 0 to ", whole.dim() - 1));
    }
    if (groups < 1 || whole.size(dim) % (groups * ranks) != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(what, "expected a size that they divide"));
    }
    if (sharers[static_cast<size_t>(it->second->index)] > 1) {
      return absl::InvalidArgumentError(
          absl::StrCat(what, "it shares memory with another; leave it whole"));
    }
    found.push_back({it->second, TensorPlacement::Shard(dim, groups)});
  }
  return found;
}

absl::Status CheckNoSyncBatchNorm(const torch::nn::Module& module,
                                  absl::string_view axis) {
  for (const auto& each : module.modules()) {
    if (!absl::StrContains(each->name(), "SyncBatchNorm")) continue;
    return absl::UnimplementedError(absl::StrCat(
        axis,
        ": SyncBatchNorm would count the samples of ranks that have the same "
        "ones several times: use torch::nn::BatchNorm"));
  }
  return absl::OkStatus();
}

// What needs whole parameters where this rank would have a part.
absl::Status CheckComposes(const proto::Config& config,
                           const Settings& settings,
                           const ParameterGroups& groups,
                           const torch::nn::Module& module) {
  const auto refuse = [&](absl::string_view what) {
    return absl::UnimplementedError(
        absl::StrCat(kKey, " ", TensorRanksOf(config), ": ", what));
  };
  if (!settings.step.adaptive_clipping.empty()) {
    return refuse(
        "adaptive_gradient_clipping needs norms of rows that are divided: use "
        "gradient_clipping");
  }
  TESSERA_RETURN_IF_ERROR(CheckNoSyncBatchNorm(
      module, absl::StrCat(kKey, " ", TensorRanksOf(config))));
  if (!settings.optimizer.has_value()) return absl::OkStatus();
  const std::string& states = config.optimizer().params().state_dtype();
  if (absl::StrContains(states, "8")) {
    return refuse(absl::StrCat("optimizer.params.state_dtype ", states,
                               " has blocks, which parts would cut: use bf16"));
  }
  for (const OptimizerOptions& group : groups.options) {
    const AlgorithmRow& row = RowOf(group.algorithm);
    const Formula formula = row.formula(group);
    if (row.directed == nullptr && !HasShapedStates(formula) &&
        group.algorithm != Algorithm::kCustom &&
        group.algorithm != Algorithm::kCustomOfRate) {
      continue;
    }
    return refuse(absl::StrCat(
        "the optimizer ", row.name,
        " needs whole parameters; use one that steps each element by itself, "
        "as AdamW"));
  }
  return absl::OkStatus();
}

std::vector<TensorCut> CutsOf(const TensorPlan& plan) {
  std::vector<TensorCut> cuts;
  for (const PlannedPart& part : plan.parts) {
    cuts.push_back({part.name, part.dim, part.groups});
  }
  return cuts;
}

// The rates of a host's processors are some of two cores each.
TensorPlanOptions PlanOptionsOf(const torch::nn::Module& module,
                                const Settings& settings) {
  TensorPlanOptions options;
  const std::vector<at::Tensor> parameters = module.parameters();
  if (!parameters.empty() && parameters[0].is_cpu()) {
    options.flops_per_second = 5e10;
    options.memory_bytes_per_second = 5e9;
    options.link_bytes_per_second = 2e9;
    options.seconds_per_collective = 3e-5;
  }
  if (settings.world_size == 1) options.reduced_bytes_per_element = 0;
  return options;
}

}  // namespace

absl::StatusOr<std::vector<TensorCut>> ChooseTensorCuts(
    const proto::Config& config, const Settings& settings,
    const ParameterGroups& groups, const EngineOptions& options,
    const torch::nn::Module& module) {
  TESSERA_RETURN_IF_ERROR(CheckComposes(config, settings, groups, module));
  if (options.tensor_cuts.has_value()) return *options.tensor_cuts;
  const int ranks = TensorRanksOf(config);
  std::vector<PartPattern> patterns;
  for (const auto& [pattern, how] : config.tensor_parallel().tp_plan()) {
    patterns.push_back({pattern, how});
  }
  if (!patterns.empty()) {
    // A map has no order: the longer one says more.
    std::sort(patterns.begin(), patterns.end(),
              [](const PartPattern& a, const PartPattern& b) {
                return std::tuple(b.pattern.size(), a.pattern) <
                       std::tuple(a.pattern.size(), b.pattern);
              });
    TESSERA_ASSIGN_OR_RETURN(const TensorPlan plan,
                             TensorPlanOf(module, patterns, ranks));
    return CutsOf(plan);
  }
  if (options.planned_loss != nullptr) {
    const int64_t samples = config.train_micro_batch_size_per_gpu();
    TESSERA_ASSIGN_OR_RETURN(
        const TensorPlan plan,
        FindTensorPlan(
            module, [&] { return options.planned_loss(samples); }, ranks,
            PlanOptionsOf(module, settings)));
    TESSERA_LOG_RANK0(INFO) << plan.ToString();
    return CutsOf(plan);
  }
  return absl::InvalidArgumentError(
      absl::StrCat(kKey, " ", TensorRanksOf(config),
                   ": nothing says which layers are divided: set "
                   "tensor_parallel.tp_plan, or "
                   "EngineOptions::planned_loss, by which it is found"));
}

void TensorParts::PlaceOne(const TensorPlacement& placement, at::Tensor part,
                           NamedParameter* parameter) {
  // Hooks of a part come before the engine's, also where it is trained later.
  part.set_requires_grad(part.is_floating_point() || part.is_complex());
  PlaceInPlace(parameter->tensor, part, placement, group_);
  part.set_requires_grad(parameter->tensor.requires_grad());
  placed_.push_back(std::exchange(parameter->tensor, part));
}

absl::Status TensorParts::Divide(const std::vector<TensorCut>& cuts,
                                 const std::shared_ptr<Communicator>& ranks,
                                 std::vector<UnitPlan>* units) {
  const int parts = ranks->world_size();
  TESSERA_ASSIGN_OR_RETURN(const std::vector<Cut> found,
                           Find(cuts, parts, units));
  group_ = std::make_shared<PartGroup>(ranks);
  for (const Cut& cut : found) {
    NamedParameter& p = *cut.parameter;
    TESSERA_RETURN_IF_ERROR(CatchTorch(p.name, [&] {
      const TensorPlacement& placement = cut.placement;
      const at::Tensor part = SlicePart(p.tensor, placement, *group_);
      p.part = PartOfWhole{p.tensor.sizes().vec(), placement.dim,
                           placement.groups, group_->rank(), parts};
      PlaceOne(placement, part, &p);
    }));
  }
  for (UnitPlan& unit : *units) {
    for (NamedParameter& p : unit.parameters) {
      p.counted_elsewhere = !p.part.has_value() && group_->rank() > 0;
    }
  }
  return absl::OkStatus();
}

absl::Status TensorParts::Copy(const torch::nn::Module& module,
                               const std::shared_ptr<Communicator>& ranks,
                               std::vector<UnitPlan>* units) {
  TESSERA_RETURN_IF_ERROR(CheckNoSyncBatchNorm(
      module, absl::StrCat("sequence_parallel_size ", ranks->world_size())));
  group_ = std::make_shared<PartGroup>(ranks);
  for (UnitPlan& unit : *units) {
    for (NamedParameter& p : unit.parameters) {
      TESSERA_RETURN_IF_ERROR(CatchTorch(p.name, [&] {
        TorchScope scope;
        PlaceOne(TensorPlacement::Copy(), p.tensor.detach(), &p);
      }));
    }
  }
  return absl::OkStatus();
}

void TensorParts::RenewDtypes() const {
  for (const at::Tensor& each : placed_) RenewDtype(each);
}

absl::Status TensorParts::GiveBack() {
  while (!placed_.empty()) {
    TESSERA_RETURN_IF_ERROR(
        CatchTorch(kWhat, [&] { GatherInPlace(placed_.back()); }));
    placed_.pop_back();
  }
  return absl::OkStatus();
}

}  // namespace tessera
