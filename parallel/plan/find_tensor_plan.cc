// The search for a plan.
//
// Most single changes of a good plan are worse than both neighbours (a
// column-parallel product without the row-parallel one after it has to gather),
// so a search needs a start: a walk through the module's products
// (placement_walk.h). Where parts come to an operator without a rule, what gave
// them is left whole, and the module is walked again. From there, or from
// nothing divided if that is better, classes of parameters are changed while
// that takes less time; vectors follow the products that they belong to.
#include <algorithm>
#include <limits>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"
#include "parallel/plan/planned_parameters.h"
#include "parallel/plan/planned_run.h"
#include "parallel/plan/tensor_plan.h"

namespace tessera {
namespace {

constexpr int kMostWalks = 64;
constexpr int kMostSweeps = 3;

// Parameters that are divided in one way: those of repeated blocks.
struct PlanClass {
  std::vector<size_t> members;  // numbers of parameters
  std::vector<int64_t> choices;
  // Which run of products from a column-parallel one to a row-parallel one it
  // belongs to; -1: none.
  int segment = -1;
};

class PlanSearch {
 public:
  explicit PlanSearch(const PlanSubject& subject) : subject_(subject) {}
  absl::StatusOr<TensorPlan> Find();

 private:
  const PlannedParameter& parameter(size_t i) const {
    return subject_.parameters[i];
  }
  size_t size() const { return subject_.parameters.size(); }
  bool Varies(size_t i) const {
    return parameter(i).stays_whole.empty() && parameter(i).tensor.dim() >= 2;
  }
  bool FollowsUse(size_t i) const {
    return parameter(i).stays_whole.empty() && parameter(i).tensor.dim() == 1;
  }

  void Walk();
  void Change(const std::vector<PlacementWalk::Decision>& decisions,
              size_t first, int64_t how, PartDims* dims) const;
  void Mend(const PlannedRun& run, PartDims* dims);
  void MakeClasses();
  PartDims AllWhole() const;
  double SecondsOf(const PartDims& dims);
  PartDims With(const PartDims& dims, const PlanClass& of, int64_t dim) const;
  bool TryTake(const PartDims& dims, PartDims* best);
  PartDims Improve(PartDims from);
  absl::StatusOr<TensorPlan> PlanOf(const PartDims& dims,
                                    const PlannedRun& whole);

  const PlanSubject& subject_;
  PartDims walked_;            // vectors are kByUse
  std::vector<int> segments_;  // by parameter
  std::vector<PlanClass> classes_;
  absl::flat_hash_map<PartDims, double> seconds_;
  int runs_ = 0;
};

// Nothing divided, except vectors that meet parts.
PartDims PlanSearch::AllWhole() const {
  PartDims dims(size(), kStaysWhole);
  for (size_t i = 0; i < size(); ++i) {
    if (FollowsUse(i)) dims[i] = kByUse;
  }
  return dims;
}

// Divides the parameter of a decision otherwise, and those of later blocks that
// were divided like it.
void PlanSearch::Change(const std::vector<PlacementWalk::Decision>& decisions,
                        size_t first, int64_t how, PartDims* dims) const {
  const auto& wrong = decisions[first];
  const PlannedParameter& of = parameter(wrong.parameter);
  const std::string name = WithoutNumbers(of.name);
  for (size_t k = first; k < decisions.size(); ++k) {
    const PlannedParameter& other = parameter(decisions[k].parameter);
    if (decisions[k].placement == wrong.placement &&
        other.tensor.sizes() == of.tensor.sizes() &&
        WithoutNumbers(other.name) == name) {
      (*dims)[decisions[k].parameter] = how;
    }
  }
}

// What has no rule for the slices of a column-parallel product may have one for
// those of its groups: [q | k | v], [gate | up].
void PlanSearch::Mend(const PlannedRun& run, PartDims* dims) {
  const size_t first = *run.first_gathered;
  const PlacementWalk::Decision& wrong = run.decisions[first];
  const PartDims before = *dims;
  Change(run.decisions, first, kStaysWhole, dims);
  double seconds = SecondsOf(*dims);
  for (const int64_t groups : {3, 2}) {
    const auto placement = TensorPlacement::Shard(wrong.placement.dim, groups);
    if (wrong.row ||
        !CanDivide(parameter(wrong.parameter), placement, subject_.ranks)) {
      continue;
    }
    PartDims in_groups = before;
    Change(run.decisions, first, DividedAlong(placement), &in_groups);
    if (SecondsOf(in_groups) >= seconds) continue;
    seconds = SecondsOf(in_groups);
    *dims = in_groups;
  }
}

void PlanSearch::Walk() {
  PartDims dims(size(), kStaysWhole);
  for (size_t i = 0; i < size(); ++i) {
    if (Varies(i) || FollowsUse(i)) dims[i] = kByUse;
  }
  walked_ = AllWhole();
  segments_.assign(size(), -1);
  for (int walks = 0; walks < kMostWalks; ++walks) {
    const auto run = RunPlanned(subject_, dims);
    if (!run.ok()) {
      TESSERA_LOG(WARNING) << "tensor plan: a walk along the module's products "
                              "failed, so the search begins with all "
                              "parameters whole: "
                           << run.status().message();
      return;
    }
    if (run->first_gathered.has_value() && walks + 1 < kMostWalks) {
      Mend(*run, &dims);
      continue;
    }
    for (size_t i = 0; i < size(); ++i) {
      if (dims[i] >= 0) walked_[i] = dims[i];
    }
    int segment = 0;
    for (const PlacementWalk::Decision& each : run->decisions) {
      if (!Varies(each.parameter)) continue;
      walked_[each.parameter] = DividedAlong(each.placement);
      segments_[each.parameter] = segment;
      if (each.row) ++segment;
    }
    return;
  }
}

void PlanSearch::MakeClasses() {
  using Key = std::tuple<std::string, std::vector<int64_t>, int64_t>;
  std::map<Key, size_t> known;
  for (size_t i = 0; i < size(); ++i) {
    if (!Varies(i)) continue;
    const at::Tensor& tensor = parameter(i).tensor;
    const auto [it, is_new] =
        known.try_emplace(Key(WithoutNumbers(parameter(i).name),
                              tensor.sizes().vec(), walked_[i]),
                          classes_.size());
    if (is_new) {
      PlanClass added;
      added.segment = segments_[i];
      added.choices.push_back(kStaysWhole);
      // Only channels of a convolution are divided.
      const int64_t dims = tensor.dim() > 3 ? 2 : tensor.dim();
      for (int64_t dim = 0; dim < dims; ++dim) {
        if (CanDivide(parameter(i), TensorPlacement::Shard(dim),
                      subject_.ranks)) {
          added.choices.push_back(dim);
        }
      }
      if (walked_[i] >= kMostDims) added.choices.push_back(walked_[i]);
      classes_.push_back(std::move(added));
    }
    classes_[it->second].members.push_back(i);
  }
}

double PlanSearch::SecondsOf(const PartDims& dims) {
  const auto known = seconds_.find(dims);
  if (known != seconds_.end()) return known->second;
  double seconds = std::numeric_limits<double>::infinity();
  if (++runs_ > subject_.options.most_runs) return seconds;
  const auto run = RunPlanned(subject_, dims);
  if (run.ok() && !run->gathers_parameters) seconds = run->seconds;
  seconds_[dims] = seconds;
  return seconds;
}

PartDims PlanSearch::With(const PartDims& dims, const PlanClass& of,
                          int64_t dim) const {
  PartDims changed = dims;
  for (size_t i : of.members) changed[i] = dim;
  return changed;
}

// Takes `dims` as `best` if it takes less time, rounding aside.
bool PlanSearch::TryTake(const PartDims& dims, PartDims* best) {
  if (!(SecondsOf(dims) < SecondsOf(*best) * (1 - 1e-9))) return false;
  *best = dims;
  return true;
}

PartDims PlanSearch::Improve(PartDims best) {
  for (int sweep = 0; sweep < kMostSweeps; ++sweep) {
    bool better = false;
    for (const PlanClass& each : classes_) {
      for (int64_t dim : each.choices) {
        better |= TryTake(With(best, each, dim), &best);
      }
    }
    // A column without its row, or a row without its column, may be worse than
    // both and than neither.
    int segments = 0;
    for (const PlanClass& each : classes_) {
      segments = std::max(segments, each.segment + 1);
    }
    for (int segment = 0; segment < segments; ++segment) {
      PartDims whole = best, walked = best;
      for (const PlanClass& each : classes_) {
        if (each.segment != segment) continue;
        whole = With(whole, each, kStaysWhole);
        walked = With(walked, each, walked_[each.members[0]]);
      }
      better |= TryTake(whole, &best);
      better |= TryTake(walked, &best);
    }
    if (!better) break;
  }
  return best;
}

absl::StatusOr<TensorPlan> PlanSearch::PlanOf(const PartDims& dims,
                                              const PlannedRun& whole) {
  TESSERA_ASSIGN_OR_RETURN(const PlannedRun found, RunPlanned(subject_, dims));
  PartDims all = dims;
  for (int64_t& dim : all) {
    if (dim == kByUse) dim = kStaysWhole;
  }
  for (const auto& each : found.decisions) {
    all[each.parameter] = DividedAlong(each.placement);
  }
  TESSERA_ASSIGN_OR_RETURN(const PlannedRun run, RunPlanned(subject_, all));
  TensorPlan plan;
  SetParts(subject_, all, &plan);
  SetCosts(run, whole, &plan);
  return plan;
}

absl::StatusOr<TensorPlan> PlanSearch::Find() {
  // The user's own errors end it here.
  TESSERA_ASSIGN_OR_RETURN(const PlannedRun whole,
                           RunPlanned(subject_, PartDims(size(), kStaysWhole)));
  if (subject_.ranks == 1) {
    TensorPlan plan;
    SetParts(subject_, PartDims(size(), kStaysWhole), &plan);
    SetCosts(whole, whole, &plan);
    return plan;
  }
  Walk();
  MakeClasses();
  PartDims best = AllWhole();
  TryTake(walked_, &best);
  return PlanOf(Improve(best), whole);
}

}  // namespace

absl::StatusOr<TensorPlan> FindTensorPlan(
    const torch::nn::Module& module, const std::function<at::Tensor()>& loss,
    int ranks, const TensorPlanOptions& options) {
  if (ranks < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor plan: expected 1 rank or more, got ", ranks));
  }
  const PlanSubject subject{&module, ranks, PlannedParameters(module), loss,
                            options};
  return PlanSearch(subject).Find();
}

}  // namespace tessera
