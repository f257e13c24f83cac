#include "engine/values/averages.h"

#include "absl/strings/str_cat.h"
#include "base/layout/flat_buffer.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "engine/model/exclusive_scope.h"
#include "torch/csrc/autograd/variable.h"

namespace tessera {
namespace {

absl::Status Publish(FlatParameter* flat) {
  TESSERA_RETURN_IF_ERROR(flat->PublishOwned());
  for (const auto& p : flat->parameters()) {
    torch::autograd::impl::bump_version(p.tensor);
  }
  return absl::OkStatus();
}

}  // namespace

bool Averages::IsScheduleFree() const {
  return groups_.groups().options[0].algorithm == Algorithm::kScheduleFree;
}

absl::Status Averages::Check(bool in) const {
  if (optimization_.optimizer() == nullptr ||
      (groups_.groups().options[0].ema_decay == 0 && !IsScheduleFree())) {
    return absl::FailedPreconditionError(
        "no averages are kept; set optimizer.params.ema_decay above 0, or "
        "train with AdamWScheduleFree");
  }
  if (guard_->life().averaged() == in) {
    return absl::FailedPreconditionError(
        in ? "the parameters are their averages already"
           : "the parameters are not their averages");
  }
  return absl::OkStatus();
}

// Elements of [owned], and their group's options, of what has been stepped: a
// parameter that never was has no average.
template <typename Visit>
void Averages::VisitStepped(const FlatParameter& flat,
                            const Visit& visit) const {
  for (const auto& segment : flat.segments()) {
    const auto& p = flat.parameters()[static_cast<size_t>(segment.parameter)];
    const auto index = static_cast<size_t>(p.index);
    if (optimization_.optimizer()->parameter_steps()[index] == 0) continue;
    visit(Range{segment.range.begin - flat.owned().begin,
                segment.range.end - flat.owned().begin},
          groups_.groups()
              .options[static_cast<size_t>(groups_.groups().of[index])]);
  }
}

// Where masters are kept, of all units that have states.
absl::Status Averages::MakeRoom() {
  training_points_.resize(guard_->model().flats().size());
  const std::vector<uint8_t> has_state = optimization_.optimizer()->has_state();
  for (size_t u = 0; u < guard_->model().flats().size(); ++u) {
    if (has_state[u] == 0) continue;
    const FlatParameter& flat = *guard_->model().flats()[u];
    const FlatParameterOptions& options = flat.options();
    TESSERA_ASSIGN_OR_RETURN(
        training_points_[u],
        TieredBuffer::Allocate(flat.owned().numel(), flat.dtype_of_masters(),
                               flat.device(), MemoryKind::kOptimizer,
                               options.PlaceOf(options.states),
                               absl::StrCat("masters of unit ", flat.name())));
  }
  return absl::OkStatus();
}

// x = y + (1 - 1 / beta1) * (z - y), each operation rounded once, so that it
// does not depend on shards. What it is made of cannot be found from it to the
// bit, so y is kept.
absl::Status Averages::EvaluateUnit(size_t u) {
  FlatParameter& flat = *guard_->model().flats()[u];
  if (!training_points_[u].defined()) return absl::OkStatus();
  std::vector<TieredBuffer>& states =
      optimization_.optimizer()->states(static_cast<int>(u));
  TESSERA_ASSIGN_OR_RETURN(Raised masters, Raised::Of(flat.masters_buffer()));
  TESSERA_ASSIGN_OR_RETURN(const Raised raised_z, Raised::Of(&states[0]));
  TieredBuffer& kept = training_points_[u];
  TESSERA_ASSIGN_OR_RETURN(Raised raised_kept, Raised::Of(&kept));
  kept.View().copy_(flat.masters());
  VisitStepped(flat, [&](Range range, const OptimizerOptions& o) {
    const at::Tensor y = Slice(flat.masters(), range);
    const at::Tensor z = Slice(states[0].View(), range);
    y.add_((z - y).mul_(1 - 1 / o.beta1));
  });
  TESSERA_RETURN_IF_ERROR(raised_kept.Commit());
  TESSERA_RETURN_IF_ERROR(masters.Commit());
  return Publish(&flat);
}

absl::Status Averages::TrainUnit(size_t u) {
  TieredBuffer& kept = training_points_[u];
  if (!kept.defined()) return absl::OkStatus();
  FlatParameter& flat = *guard_->model().flats()[u];
  TESSERA_ASSIGN_OR_RETURN(Raised masters, Raised::Of(flat.masters_buffer()));
  {
    TESSERA_ASSIGN_OR_RETURN(const Raised raised, Raised::Of(&kept));
    flat.masters().copy_(kept.View());
  }
  kept.Reset();
  TESSERA_RETURN_IF_ERROR(masters.Commit());
  return Publish(&flat);
}

absl::Status Averages::SwapUnit(size_t u) {
  TieredBuffer* const average = optimization_.optimizer()->average(u);
  if (average == nullptr) return absl::OkStatus();
  FlatParameter& flat = *guard_->model().flats()[u];
  TESSERA_ASSIGN_OR_RETURN(Raised masters, Raised::Of(flat.masters_buffer()));
  TESSERA_ASSIGN_OR_RETURN(Raised averages, Raised::Of(average));
  VisitStepped(flat, [&](Range range, const OptimizerOptions&) {
    const at::Tensor a = Slice(flat.masters(), range);
    const at::Tensor b = Slice(average->View(), range);
    const at::Tensor before = a.clone();
    a.copy_(b);
    b.copy_(before);
  });
  TESSERA_RETURN_IF_ERROR(masters.Commit());
  TESSERA_RETURN_IF_ERROR(averages.Commit());
  return Publish(&flat);
}

absl::Status Averages::Swap(bool in) {
  const char* const where =
      in ? "Engine::SwapInAverages" : "Engine::SwapOutAverages";
  TESSERA_RETURN_IF_ERROR(guard_->life().CheckOpen());
  ExclusiveScope scope(guard_, where);
  absl::Status mine = Check(in);
  const bool keeps = mine.ok() && in && IsScheduleFree();
  if (keeps) mine = CatchTorch(where, [&] { return MakeRoom(); });
  const absl::Status begun = scope.Begin(mine);
  if (!begun.ok()) {
    if (keeps) training_points_.clear();
    return begun;
  }
  const absl::Status swapped = CatchTorch(where, [&]() -> absl::Status {
    TorchScope torch_scope;
    for (size_t u = 0; u < guard_->model().flats().size(); ++u) {
      TESSERA_RETURN_IF_ERROR(!IsScheduleFree() ? SwapUnit(u)
                              : in              ? EvaluateUnit(u)
                                                : TrainUnit(u));
    }
    return absl::OkStatus();
  });
  if (!swapped.ok()) {
    guard_->life().Lose(swapped);
    return scope.Fail(swapped);
  }
  guard_->life().SetAveraged(in);
  return scope.Commit();
}

int64_t Averages::resident_bytes() const {
  int64_t bytes = 0;
  for (const TieredBuffer& kept : training_points_) {
    bytes += kept.resident_bytes();
  }
  return bytes;
}

}  // namespace tessera
