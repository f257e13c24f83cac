#include "engine/checkpoint/state_match.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/crc32c.h"
#include "base/status.h"
#include "engine/checkpoint/state_matcher.h"

namespace tessera {

bool StateMatch::Place::has_states() const {
  return std::any_of(states.begin() + StateTable::kFirst, states.end(),
                     [](int number) { return number >= 0; });
}

absl::StatusOr<StateMatch> StateMatch::Create(
    const StateTable& table,
    const std::vector<std::shared_ptr<FlatParameter>>& flats,
    const proto::CheckpointManifest& manifest,
    const LoadCheckpointOptions& options) {
  StateMatcher matcher(table, manifest, options);
  StateMatch match;
  std::vector<StateMatcher::View> views;
  for (const StateTable::Slot& slot : table.slots()) {
    const FlatParameter& flat = *flats[static_cast<size_t>(slot.flat)];
    const Range range = flat.layout().slot(slot.slot);
    views.clear();
    for (const FlatParameter::Parameter& p : flat.parameters()) {
      if (p.slot != slot.slot) continue;
      views.push_back({p.tensor,
                       {p.range.begin - range.begin, p.range.end - range.begin},
                       SavedSizes(p),
                       SavedStrides(p)});
    }
    const Place place = matcher.Match(table.WholeNumel(slot), views, &slot);
    match.slots_.push_back(place);
    for (const StateMatcher::View& view : views) {
      const proto::CheckpointTensor* const saved =
          matcher.FoundFor(view.tensor);
      if (saved == nullptr) continue;
      // Moments that begin with zeros have no steps behind them.
      match.steps_[view.tensor.unsafeGetTensorImpl()] =
          table.num_states(slot.flat) > StateTable::kFirst &&
                  !place.has_states()
              ? 0
              : saved->steps();
    }
  }
  for (const StateTable::Plain& plain : table.plain()) {
    const int64_t numel = plain.tensor.numel() * NumbersPer(plain.tensor);
    const at::IntArrayRef sizes = plain.tensor.sizes();
    match.plain_.push_back(matcher.Match(
        numel,
        {{plain.tensor, {0, numel}, sizes.vec(), ContiguousStrides(sizes)}},
        /*slot=*/nullptr));
  }
  TESSERA_RETURN_IF_ERROR(
      matcher.Result(&match.missing_, &match.unexpected_, &match.late_));
  if (!options.model_only) {
    TESSERA_ASSIGN_OR_RETURN(match.shaped_, matcher.MatchShaped());
  }
  return match;
}

std::optional<int64_t> StateMatch::steps(const at::Tensor& tensor) const {
  const auto it = steps_.find(tensor.unsafeGetTensorImpl());
  if (it == steps_.end()) return std::nullopt;
  return it->second;
}

std::string StateMatch::Describe() const {
  std::string places;
  int loaded = 0;
  for (const auto* list : {&slots_, &plain_}) {
    for (const Place& place : *list) {
      absl::StrAppend(&places, place.storage, "+", place.shift, " ");
      loaded += place.loaded();
    }
  }
  return absl::StrCat(loaded, " of ", slots_.size() + plain_.size(),
                      " parameters and buffers, ", absl::Hex(Crc32c(places)));
}

}  // namespace tessera
