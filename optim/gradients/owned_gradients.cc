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
  std::function<bool(const FlatGradient&)> skip;
};

// Returns the parts of unit `u` for whose parameters `accepts`, without values.
template <typename Accepts>
GradientParts PartsOf(size_t u, const FlatParameter& flat, bool shards,
                      const Accepts& accepts) {
  const Range range =
      shards ? flat.layout().shard(flat.communicator()->rank()) : flat.owned();
  GradientParts parts;
  for (size_t i = 0; i < flat.parameters().size(); ++i) {
    const FlatParameter::Parameter& p = flat.parameters()[i];
    const Range mine = Intersect(p.range, range);
    if (mine.empty() || !accepts(i)) continue;
    if (shards && p.counted_elsewhere) continue;
    parts.push_back({u,
                     p,
                     {mine.begin - p.range.begin, mine.end - p.range.begin},
                     at::Tensor(),
                     p.storage_offset + mine.begin - p.range.begin});
  }
  return parts;
}

void SetValues(const FlatParameter& flat, bool shards, const at::Tensor& owned,
               GradientParts* parts) {
  for (GradientPart& part : *parts) {
    const FlatParameter::Parameter& p = part.parameter;
    part.values = owned.narrow(
        0, p.range.begin + part.elements.begin - flat.owned().begin,
        part.elements.numel());
    if (shards && p.tensor.is_complex()) {  // its parts stay together
      part.values = at::view_as_complex(part.values.view({-1, 2}));
      part.first /= 2;
    }
  }
}

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
      if (how.skip && how.skip(gradient)) continue;
      GradientParts parts = PartsOf(u, flat, how.shards, [&](size_t i) {
        return gradient.has_gradient(i) &&
               (!how.of || how.of(flat.parameters()[i]));
      });
      if (parts.empty()) continue;
      TESSERA_ASSIGN_OR_RETURN(
          Raised raised, to_change != nullptr ? to_change->of(u).RaiseToChange()
                                              : gradient.Raise());
      SetValues(flat, how.shards, gradient.owned(), &parts);
      TESSERA_RETURN_IF_ERROR(visit(gradient, parts));
      if (to_change != nullptr) TESSERA_RETURN_IF_ERROR(raised.Commit());
    }
    return absl::OkStatus();
  });
}

}  // namespace

RankCopies CopiesOver(const FlatParameter& flat, const Communicator& comm) {
  RankCopies copies;
  if (flat.replicas() != nullptr) copies.copies = flat.replicas()->world_size();
  copies.neighbours = comm.world_size() / copies.copies / flat.options().stages;
  return copies;
}

absl::Status VisitShards(
    absl::string_view what, const Flats& flats, const Gradients& gradients,
    const std::function<void(const FlatGradient&, const GradientParts&)>& visit,
    const std::function<bool(const FlatGradient&)>& skip) {
  return VisitUnits({what, /*shards=*/true, nullptr, skip}, flats, gradients,
                    nullptr,
                    [&](const FlatGradient& gradient, const auto& parts) {
                      visit(gradient, parts);
                      return absl::OkStatus();
                    });
}

GradientParts ShardsOf(const FlatGradient& gradient, const at::Tensor& owned) {
  const FlatParameter& flat = gradient.flat();
  GradientParts parts =
      PartsOf(/*u=*/0, flat, /*shards=*/true, [](size_t) { return true; });
  SetValues(flat, /*shards=*/true, owned, &parts);
  return parts;
}

absl::Status VisitOwned(
    absl::string_view what, const Flats& flats, const ParameterFilter& of,
    const Gradients& gradients,
    const std::function<absl::Status(const GradientParts&)>& visit) {
  return VisitUnits(
      {what, /*shards=*/false, of, nullptr}, flats, gradients, nullptr,
      [&](const auto&, const auto& parts) { return visit(parts); });
}

absl::Status ChangeOwned(
    absl::string_view what, const Flats& flats, const ParameterFilter& of,
    Gradients* gradients,
    const std::function<void(const GradientParts&)>& change) {
  return VisitUnits({what, /*shards=*/false, of, nullptr}, flats, *gradients,
                    gradients, [&](const auto&, const auto& parts) {
                      change(parts);
                      return absl::OkStatus();
                    });
}

}  // namespace tessera
