#include "optim/gradients/owned_gradients.h"

#include "ATen/ops/view_as_complex.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"

namespace tessera {
namespace {

using Flats = std::vector<std::shared_ptr<FlatParameter>>;

struct How {
  absl::string_view what;
  bool shards = false;
  ParameterFilter of;
};

// `to_change`: null, or `gradients`.
template <typename Visit>
absl::Status VisitUnits(const How& how, const Flats& flats,
                        const Gradients& gradients, Gradients* to_change,
                        const Visit& visit) {
  return CatchTorch(how.what, [&]() -> absl::Status {
    TorchScope scope;
    for (size_t u = 0; u < flats.size(); ++u) {
      const FlatParameter& flat = *flats[u];
      const FlatGradient& gradient = gradients.of(u);
      if (!gradient.has_step_gradient()) continue;
      const Range range = how.shards
                              ? flat.layout().shard(flat.communicator()->rank())
                              : flat.owned();
      GradientParts parts;
      for (size_t i = 0; i < flat.parameters().size(); ++i) {
        const FlatParameter::Parameter& p = flat.parameters()[i];
        const Range mine = Intersect(p.range, range);
        if (!gradient.has_gradient(i) || mine.empty()) continue;
        if (how.of && !how.of(p)) continue;
        parts.push_back({u,
                         p,
                         {mine.begin - p.range.begin, mine.end - p.range.begin},
                         at::Tensor(),
                         p.storage_offset + mine.begin - p.range.begin});
      }
      if (parts.empty()) continue;
      TESSERA_ASSIGN_OR_RETURN(
          Raised raised, to_change != nullptr ? to_change->of(u).RaiseToChange()
                                              : gradient.Raise());
      const at::Tensor owned = gradient.owned();
      for (GradientPart& part : parts) {
        const FlatParameter::Parameter& p = part.parameter;
        part.values = owned.narrow(
            0, p.range.begin + part.elements.begin - flat.owned().begin,
            part.elements.numel());
        if (how.shards && p.tensor.is_complex()) {  // its parts stay together
          part.values = at::view_as_complex(part.values.view({-1, 2}));
          part.first /= 2;
        }
      }
      TESSERA_RETURN_IF_ERROR(visit(gradient, parts));
      if (to_change != nullptr) TESSERA_RETURN_IF_ERROR(raised.Commit());
    }
    return absl::OkStatus();
  });
}

}  // namespace

absl::Status VisitShards(
    absl::string_view what, const Flats& flats, const Gradients& gradients,
    const std::function<void(const FlatGradient&, const GradientParts&)>&
        visit) {
  return VisitUnits({what, /*shards=*/true, nullptr}, flats, gradients, nullptr,
                    [&](const FlatGradient& gradient, const auto& parts) {
                      visit(gradient, parts);
                      return absl::OkStatus();
                    });
}

absl::Status VisitOwned(
    absl::string_view what, const Flats& flats, const ParameterFilter& of,
    const Gradients& gradients,
    const std::function<absl::Status(const GradientParts&)>& visit) {
  return VisitUnits(
      {what, /*shards=*/false, of}, flats, gradients, nullptr,
      [&](const auto&, const auto& parts) { return visit(parts); });
}

absl::Status ChangeOwned(
    absl::string_view what, const Flats& flats, const ParameterFilter& of,
    Gradients* gradients,
    const std::function<void(const GradientParts&)>& change) {
  return VisitUnits({what, /*shards=*/false, of}, flats, *gradients, gradients,
                    [&](const auto&, const auto& parts) {
                      change(parts);
                      return absl::OkStatus();
                    });
}

}  // namespace tessera
