#include "engine/plan/replay/gradient_replay.h"

#include <algorithm>
#include <utility>

namespace tessera {

GradientReplay::GradientReplay(const std::vector<PlannedFlat>& flats,
                               const GradientOptions& options, int world_size,
                               PlanLedger* held)
    : flats_(flats),
      options_(options),
      alone_(world_size == 1),
      held_(held),
      states_(flats.size()) {
  MakeBuckets(world_size);
}

// As Gradients::MakeBuckets.
void GradientReplay::MakeBuckets(int world_size) {
  int64_t numel = 0;
  const PlannedFlat* last = nullptr;
  for (size_t i = flats_.size(); i-- > 0;) {
    const PlannedFlat& flat = flats_[i];
    const bool fits = world_size > 1 && last != nullptr &&
                      numel + flat.whole_numel <= options_.bucket_numel &&
                      flat.reduce_bytes == last->reduce_bytes &&
                      flat.sharded_gradients == last->sharded_gradients;
    if (!fits) {
      buckets_.emplace_back();
      numel = 0;
    }
    buckets_.back().push_back(i);
    numel += flat.whole_numel;
    last = &flat;
  }
}

int64_t GradientReplay::item_bytes(size_t i) const {
  return reduces_ ? flats_[i].reduce_bytes : flats_[i].local_bytes;
}

void GradientReplay::EnsureLocal(size_t i, int64_t bytes_of_item) {
  State& state = states_[i];
  if (state.in_place) {
    EnsureReduced(i);
    state.in_place = false;
  }
  const int64_t bytes = flats_[i].whole_numel * bytes_of_item;
  // What was added up in a wider dtype stays there.
  if (state.local_bytes >= bytes) return;
  held_->Add(PlanKind::kGradients, bytes);
  FreeLocal(i);
  state.local_bytes = bytes;
}

void GradientReplay::EnsureReduced(size_t i) {
  State& state = states_[i];
  if (state.reduced_bytes > 0) return;
  state.reduced_bytes = flats_[i].owned_numel() * flats_[i].gradient_bytes;
  held_->Add(PlanKind::kGradients, state.reduced_bytes);
}

void GradientReplay::FreeLocal(size_t i) {
  held_->Remove(PlanKind::kGradients, std::exchange(states_[i].local_bytes, 0));
}

void GradientReplay::Begin(const std::vector<int>& gradients, bool reduces) {
  cursor_ = 0;
  reduces_ = reduces;
  for (size_t i = 0; i < states_.size(); ++i) {
    states_[i].missing = gradients[i];
    states_[i].expected = gradients[i] > 0;
  }
}

void GradientReplay::Arrived(size_t flat) {
  --states_[flat].missing;
  if (reduces_) LaunchReady(/*all=*/false);
}

void GradientReplay::LaunchReady(bool all) {
  for (; cursor_ < buckets_.size(); ++cursor_) {
    std::vector<size_t> ready;
    for (const size_t i : buckets_[cursor_]) {
      if (!states_[i].expected) continue;
      if (!all && states_[i].missing > 0) return;
      ready.push_back(i);
    }
    if (ready.empty()) continue;
    Finish();
    Start(std::move(ready));
    if (!options_.overlap) Finish();
  }
}

// As Reduction::Start.
void GradientReplay::Start(std::vector<size_t> bucket) {
  ++reductions_;
  for (const size_t i : bucket) {
    EnsureLocal(i, flats_[i].reduce_bytes);
    reduced_bytes_ += flats_[i].whole_numel * flats_[i].reduce_bytes;
  }
  in_flight_ = std::move(bucket);
  if (in_flight_.size() > 1) {
    for (const size_t i : in_flight_) {
      packed_bytes_ += flats_[i].whole_numel * flats_[i].reduce_bytes;
    }
    held_->Add(PlanKind::kGradients, packed_bytes_);
    for (const size_t i : in_flight_) {
      if (flats_[i].sharded_gradients) FreeLocal(i);
    }
    return;
  }
  const size_t i = in_flight_[0];
  const PlannedFlat& flat = flats_[i];
  // Sums arrive where they stay.
  if (flat.sharded_gradients && !states_[i].in_step &&
      flat.owned_numel() < flat.whole_numel && flat.keeps_sums) {
    EnsureReduced(i);
  }
}

// As FlatGradient::TakeSums.
void GradientReplay::Finish() {
  if (!in_flight_.empty()) FinishStoring();
  const std::vector<size_t> flats = std::exchange(in_flight_, {});
  for (const size_t i : flats) {
    State& state = states_[i];
    const PlannedFlat& flat = flats_[i];
    const bool same = flat.keeps_sums;
    if (state.in_step) {
      const bool stays = !flat.sharded_gradients && packed_bytes_ == 0;
      if (!stays) {
        state.sums_bytes = flat.owned_numel() * flat.reduce_bytes;
        held_->Add(PlanKind::kGradients, state.sums_bytes);
      }
    } else if (!flat.sharded_gradients && same) {
      // In place.
    } else if (alone_ && same && packed_bytes_ == 0) {
      state.reduced_bytes = std::exchange(state.local_bytes, 0);
    } else {
      EnsureReduced(i);
    }
    if (flat.sharded_gradients) FreeLocal(i);
    if (flat.gradients != Tier::kMemory && !state.in_step) {
      storing_.push_back(i);
    }
  }
  if (options_.uses_up) {
    for (const size_t i : flats) UseUp(i);
  }
  held_->Remove(PlanKind::kGradients, std::exchange(packed_bytes_, 0));
}

// As FlatGradient::UseUp: its step needs no memory.
void GradientReplay::UseUp(size_t i) {
  held_->Remove(PlanKind::kGradients,
                std::exchange(states_[i].reduced_bytes, 0));
  FreeLocal(i);
}

void GradientReplay::FinishStoring() {
  for (const size_t i : std::exchange(storing_, {})) {
    held_->Remove(PlanKind::kGradients,
                  std::exchange(states_[i].reduced_bytes, 0));
  }
}

void GradientReplay::End() {
  if (!reduces_) return;
  LaunchReady(/*all=*/true);
  Finish();
  FinishStoring();
  int64_t leaves = 0;  // while the next unit's comes back
  for (size_t i = 0; i < states_.size(); ++i) {
    State& state = states_[i];
    if (!state.expected || options_.uses_up) continue;
    const PlannedFlat& flat = flats_[i];
    if (state.in_step) {
      if (flat.gradients == Tier::kMemory) {
        EnsureReduced(i);
      } else {
        const int64_t back = flat.owned_numel() * flat.gradient_bytes;
        held_->Add(PlanKind::kGradients, back);
        held_->Remove(PlanKind::kGradients, std::exchange(state.sums_bytes, 0));
        held_->Remove(PlanKind::kGradients, std::exchange(leaves, back));
      }
    } else if (!flat.sharded_gradients && flat.keeps_sums) {
      state.in_place = true;
      held_->Remove(PlanKind::kGradients,
                    std::exchange(state.reduced_bytes, 0));
    }
    state.in_step = true;
    held_->Remove(PlanKind::kGradients, std::exchange(state.sums_bytes, 0));
    if (flat.sharded_gradients) FreeLocal(i);
  }
  held_->Remove(PlanKind::kGradients, leaves);
}

void GradientReplay::Zero() {
  for (State& state : states_) {
    state.in_place = state.in_step = false;
    held_->Remove(PlanKind::kGradients, std::exchange(state.reduced_bytes, 0));
  }
}

}  // namespace tessera
