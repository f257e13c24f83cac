#include "parallel/plan/planned_run.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "parallel/plan/counted_ranks.h"
#include "parallel/plan/scoped_placement.h"
#include "parallel/tensor/part_group.h"
#include "parallel/tensor/placed.h"
#include "sharding/trace/trace.h"
#include "sharding/trace/trace_log.h"
#include "sharding/trace/tracer.h"

namespace tessera {
namespace {

// Notes "[layers.*.q] aten::view" once, whatever the layer.
void NoteOperator(const std::string& op, std::vector<std::string>* all) {
  std::string where = Tracer::Current()->Where("");
  // "[module] ": as the name of a parameter of it.
  const size_t end = where.rfind(']');
  const std::string module = absl::StrCat(where.substr(1, end - 1), ".");
  const std::string name = WithoutNumbers(absl::StrCat(module, "x"));
  where = absl::StrCat("[", OwnerOf(name), "] ", op);
  if (std::find(all->begin(), all->end(), where) == all->end()) {
    all->push_back(std::move(where));
  }
}

// A part of a parameter, which has no memory: a contiguous view of as much.
at::Tensor FakePart(const at::Tensor& parameter, int64_t dim, int ranks) {
  at::NoGradGuard no_grad;
  std::vector<int64_t> sizes = parameter.sizes().vec();
  sizes[static_cast<size_t>(dim)] /= ranks;
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size() - 1; i > 0; --i) {
    strides[i - 1] = strides[i] * sizes[i];
  }
  at::Tensor part = parameter.as_strided(sizes, strides).detach();
  part.requires_grad_(parameter.requires_grad());
  return part;
}

// Returns the elements that a rank holds of parameter `i`.
int64_t HeldNumel(const PlanSubject& subject, const PartDims& dims, size_t i) {
  const int64_t numel = subject.parameters[i].tensor.numel();
  return dims[i] >= 0 ? numel / subject.ranks : numel;
}

// Returns the time that updates take of what a rank holds.
double UpdateSeconds(const PlanSubject& subject, PartDims dims,
                     const std::vector<PlacementWalk::Decision>& decisions) {
  for (const auto& each : decisions) {
    dims[each.parameter] = DividedAlong(each.placement);
  }
  int64_t held = 0;
  for (size_t i = 0; i < dims.size(); ++i) held += HeldNumel(subject, dims, i);
  const TensorPlanOptions& options = subject.options;
  return static_cast<double>(held) *
         (options.update_bytes_per_element / options.memory_bytes_per_second +
          options.reduced_bytes_per_element / options.link_bytes_per_second);
}

double ComputeSeconds(const Trace& trace, const TensorPlanOptions& options) {
  double seconds = 0;
  for (const TraceEvent& event : trace.events) {
    if (event.kind != TraceEvent::Kind::kOperator) continue;
    seconds +=
        std::max(static_cast<double>(event.flops) / options.flops_per_second,
                 static_cast<double>(event.moved_bytes) /
                     options.memory_bytes_per_second);
  }
  return seconds;
}

// Runs forward and backward with the parameters divided. Returns what the trace
// goes on with: they must be as before when it gives them their memory and
// gradients back, so its own backward has nothing to do.
at::Tensor RunDivided(const PlanSubject& subject, const PartDims& dims,
                      const std::shared_ptr<PartGroup>& group,
                      PlacementWalk* walk) {
  std::vector<std::unique_ptr<ScopedPlacement>> placed;
  for (size_t i = 0; i < dims.size(); ++i) {
    const at::Tensor& parameter = subject.parameters[i].tensor;
    walk->Add(i, parameter, /*by_use=*/dims[i] == kByUse);
    if (dims[i] < 0) continue;
    placed.push_back(std::make_unique<ScopedPlacement>(
        parameter, FakePart(parameter, PlacementOf(dims[i]).dim, subject.ranks),
        PlacementOf(dims[i]), group));
  }
  // In backward, too, which may compute activations anew.
  PlacementWalk::Scope scope(walk);
  const at::Tensor loss = Whole(subject.loss());
  walk->EndForward();
  if (!loss.defined() || loss.numel() != 1) return loss;
  loss.backward();
  return at::zeros({}, loss.options()).requires_grad_();
}

}  // namespace

absl::StatusOr<PlannedRun> RunPlanned(const PlanSubject& subject,
                                      const PartDims& dims) {
  PlannedRun run;
  const auto ranks = std::make_shared<CountedRanks>(subject.ranks);
  const auto group = std::make_shared<PartGroup>(ranks);
  PlacementWalk walk(group);
  group->set_on_gathered([&](const std::string& op) {
    NoteOperator(op, &run.gathered);
    walk.Gathers();
  });
  const absl::StatusOr<Trace> trace = TakeTrace(
      *subject.module, [&] { return RunDivided(subject, dims, group, &walk); },
      subject.options.trace);
  group->set_on_gathered(nullptr);  // autograd may hold the group on
  if (!trace.ok()) return trace.status();
  run.collectives = ranks->collectives();
  run.bytes = ranks->bytes();
  run.flops = trace->flops();
  run.decisions = walk.decisions();
  run.seconds = ComputeSeconds(*trace, subject.options) +
                UpdateSeconds(subject, dims, run.decisions) +
                ranks->sent_bytes() / subject.options.link_bytes_per_second +
                static_cast<double>(run.collectives) *
                    subject.options.seconds_per_collective;
  run.first_gathered = walk.gathered();
  run.gathers_parameters = walk.gathers_parameters();
  return run;
}

void SetParts(const PlanSubject& subject, const PartDims& dims,
              TensorPlan* plan) {
  plan->ranks = subject.ranks;
  plan->parts.clear();
  plan->part_numel = plan->whole_numel = 0;
  for (size_t i = 0; i < dims.size(); ++i) {
    const int64_t numel = HeldNumel(subject, dims, i);
    if (dims[i] < 0) {
      plan->whole_numel += numel;
    } else {
      plan->part_numel += numel;
      const TensorPlacement placement = PlacementOf(dims[i]);
      plan->parts.push_back(
          {subject.parameters[i].name, placement.dim, placement.groups});
    }
  }
}

void SetCosts(const PlannedRun& run, const PlannedRun& whole,
              TensorPlan* plan) {
  plan->collectives = run.collectives;
  plan->bytes = run.bytes;
  plan->flops = run.flops;
  plan->gathered = run.gathered;
  plan->seconds = run.seconds;
  plan->whole_seconds = whole.seconds;
}

}  // namespace tessera
