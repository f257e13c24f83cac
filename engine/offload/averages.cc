#include "engine/offload/averages.h"

#include "absl/strings/str_cat.h"
#include "base/layout/flat_buffer.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "engine/parts/exclusive_scope.h"
#include "offload/tiered_buffer.h"
#include "optim/algorithms/algorithm.h"
#include "torch/csrc/autograd/variable.h"

namespace tessera {
namespace {

bool HasOwnAverage(const EngineParts& parts) {
  return RowOf(parts.groups.options[0].algorithm).averages;
}

absl::Status Check(const EngineParts& parts, bool in) {
  if (parts.optimizer == nullptr ||
      (parts.groups.options[0].ema_decay == 0 && !HasOwnAverage(parts))) {
    return absl::FailedPreconditionError(
        "no averages are kept; set optimizer.params.ema_decay above 0, or "
        "train with AdamWScheduleFree");
  }
  if (parts.averages_in == in) {
    return absl::FailedPreconditionError(
        in ? "the parameters are their averages already"
           : "the parameters are not their averages");
  }
  return absl::OkStatus();
}

// Elements of [owned], and their group's options, of what has been stepped: a
// parameter that never was has no average.
template <typename Visit>
void VisitStepped(const EngineParts& parts, const FlatParameter& flat,
                  const Visit& visit) {
  for (const auto& segment : flat.segments()) {
    const auto& p = flat.parameters()[static_cast<size_t>(segment.parameter)];
    const auto index = static_cast<size_t>(p.index);
    if (parts.optimizer->parameter_steps()[index] == 0) continue;
    visit(Range{segment.range.begin - flat.owned().begin,
                segment.range.end - flat.owned().begin},
          parts.groups.options[static_cast<size_t>(parts.groups.of[index])]);
  }
}

absl::Status Publish(FlatParameter* flat) {
  TESSERA_RETURN_IF_ERROR(flat->PublishOwned());
  for (const auto& p : flat->parameters()) {
    torch::autograd::impl::bump_version(p.tensor);
  }
  return absl::OkStatus();
}

// Where masters are kept, of all units that have states.
absl::Status MakeRoom(EngineParts* parts) {
  parts->training_points.resize(parts->flats.size());
  const std::vector<uint8_t> has_state = parts->optimizer->has_state();
  for (size_t u = 0; u < parts->flats.size(); ++u) {
    if (has_state[u] == 0) continue;
    const FlatParameter& flat = *parts->flats[u];
    const FlatParameterOptions& options = flat.options();
    TESSERA_ASSIGN_OR_RETURN(
        parts->training_points[u],
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
absl::Status EvaluateUnit(EngineParts* parts, size_t u) {
  FlatParameter& flat = *parts->flats[u];
  if (!parts->training_points[u].defined()) return absl::OkStatus();
  std::vector<TieredBuffer>& states =
      parts->optimizer->states(static_cast<int>(u));
  TESSERA_ASSIGN_OR_RETURN(Raised masters, Raised::Of(flat.masters_buffer()));
  TESSERA_ASSIGN_OR_RETURN(const Raised raised_z, Raised::Of(&states[0]));
  TieredBuffer& kept = parts->training_points[u];
  TESSERA_ASSIGN_OR_RETURN(Raised raised_kept, Raised::Of(&kept));
  kept.View().copy_(flat.masters());
  VisitStepped(*parts, flat, [&](Range range, const OptimizerOptions& o) {
    const at::Tensor y = Slice(flat.masters(), range);
    const at::Tensor z = Slice(states[0].View(), range);
    y.add_((z - y).mul_(1 - 1 / o.beta1));
  });
  TESSERA_RETURN_IF_ERROR(raised_kept.Commit());
  TESSERA_RETURN_IF_ERROR(masters.Commit());
  return Publish(&flat);
}

absl::Status TrainUnit(EngineParts* parts, size_t u) {
  TieredBuffer& kept = parts->training_points[u];
  if (!kept.defined()) return absl::OkStatus();
  FlatParameter& flat = *parts->flats[u];
  TESSERA_ASSIGN_OR_RETURN(Raised masters, Raised::Of(flat.masters_buffer()));
  {
    TESSERA_ASSIGN_OR_RETURN(const Raised raised, Raised::Of(&kept));
    flat.masters().copy_(kept.View());
  }
  kept.Reset();
  TESSERA_RETURN_IF_ERROR(masters.Commit());
  return Publish(&flat);
}

absl::Status SwapUnit(EngineParts* parts, size_t u) {
  TieredBuffer* const average = parts->optimizer->average(u);
  if (average == nullptr) return absl::OkStatus();
  FlatParameter& flat = *parts->flats[u];
  TESSERA_ASSIGN_OR_RETURN(Raised masters, Raised::Of(flat.masters_buffer()));
  TESSERA_ASSIGN_OR_RETURN(Raised averages, Raised::Of(average));
  VisitStepped(*parts, flat, [&](Range range, const OptimizerOptions&) {
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

absl::Status Swap(EngineParts* parts, size_t u, bool in) {
  if (!HasOwnAverage(*parts)) return SwapUnit(parts, u);
  return in ? EvaluateUnit(parts, u) : TrainUnit(parts, u);
}

}  // namespace

absl::Status SwapAverages(EngineParts* parts, bool in) {
  const char* const where =
      in ? "Engine::SwapInAverages" : "Engine::SwapOutAverages";
  TESSERA_RETURN_IF_ERROR(parts->CheckOpen());
  ExclusiveScope scope(parts, where);
  absl::Status mine = Check(*parts, in);
  const bool keeps = mine.ok() && in && HasOwnAverage(*parts);
  if (keeps) mine = CatchTorch(where, [&] { return MakeRoom(parts); });
  const absl::Status begun = scope.Begin(mine);
  if (!begun.ok()) {
    if (keeps) parts->training_points.clear();
    return begun;
  }
  const absl::Status swapped = CatchTorch(where, [&]() -> absl::Status {
    TorchScope torch_scope;
    for (size_t u = 0; u < parts->flats.size(); ++u) {
      TESSERA_RETURN_IF_ERROR(Swap(parts, u, in));
    }
    return absl::OkStatus();
  });
  if (!swapped.ok()) {
    parts->Lose(swapped);
    return scope.Fail(swapped);
  }
  parts->averages_in = in;
  return scope.Commit();
}

}  // namespace tessera
