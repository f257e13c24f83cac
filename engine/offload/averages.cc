#include "engine/offload/averages.h"

#include "base/status.h"
#include "base/torch_guard.h"
#include "engine/parts/exclusive_scope.h"
#include "sharding/layout/flat_buffer.h"
#include "sharding/torch/torch_scope.h"
#include "torch/csrc/autograd/variable.h"

namespace tessera {
namespace {

absl::Status Check(const EngineParts& parts, bool in) {
  if (parts.optimizer == nullptr || parts.groups.options[0].ema_decay == 0) {
    return absl::FailedPreconditionError(
        "no averages are kept; set optimizer.params.ema_decay above 0");
  }
  if (parts.averages_in == in) {
    return absl::FailedPreconditionError(
        in ? "the parameters are their averages already"
           : "the parameters are not their averages");
  }
  return absl::OkStatus();
}

// What has been stepped: a parameter that never was has no average.
absl::Status SwapUnit(EngineParts* parts, size_t u) {
  TieredBuffer* const average = parts->optimizer->average(u);
  if (average == nullptr) return absl::OkStatus();
  FlatParameter& flat = *parts->flats[u];
  TESSERA_ASSIGN_OR_RETURN(Raised masters, Raised::Of(flat.masters_buffer()));
  TESSERA_ASSIGN_OR_RETURN(Raised averages, Raised::Of(average));
  for (const auto& segment : flat.segments()) {
    const auto& p = flat.parameters()[static_cast<size_t>(segment.parameter)];
    const auto index = static_cast<size_t>(p.index);
    if (parts->optimizer->parameter_steps()[index] == 0) continue;
    const Range range = {segment.range.begin - flat.owned().begin,
                         segment.range.end - flat.owned().begin};
    const at::Tensor a = Slice(flat.masters(), range);
    const at::Tensor b = Slice(average->View(), range);
    const at::Tensor before = a.clone();
    a.copy_(b);
    b.copy_(before);
  }
  TESSERA_RETURN_IF_ERROR(masters.Commit());
  TESSERA_RETURN_IF_ERROR(averages.Commit());
  TESSERA_RETURN_IF_ERROR(flat.PublishOwned());
  for (const auto& p : flat.parameters()) {
    torch::autograd::impl::bump_version(p.tensor);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status SwapAverages(EngineParts* parts, bool in) {
  const char* const where =
      in ? "Engine::SwapInAverages" : "Engine::SwapOutAverages";
  TESSERA_RETURN_IF_ERROR(parts->CheckOpen());
  ExclusiveScope scope(parts, where);
  TESSERA_RETURN_IF_ERROR(scope.Begin(Check(*parts, in)));
  const absl::Status swapped = CatchTorch(where, [&]() -> absl::Status {
    TorchScope torch_scope;
    for (size_t u = 0; u < parts->flats.size(); ++u) {
      TESSERA_RETURN_IF_ERROR(SwapUnit(parts, u));
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
