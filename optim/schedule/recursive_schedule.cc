#include "optim/schedule/recursive_schedule.h"

#include <algorithm>

namespace tessera {

RecursiveSchedule::Track* RecursiveSchedule::TrackOf(double base_lr) const {
  for (Track& track : tracks_) {
    if (track.base_lr == base_lr) return &track;
  }
  const double first = First(base_lr);
  tracks_.push_back({base_lr, 0, first, {first}});
  return &tracks_.back();
}

double RecursiveSchedule::Rate(int64_t steps_done, double base_lr) const {
  const int64_t step = std::min(steps_done, LastChange());
  Track& track = *TrackOf(base_lr);
  if (step < track.step) {
    const int64_t mark = step / kMarkSteps;
    track.step = mark * kMarkSteps;
    track.rate = track.marks[static_cast<size_t>(mark)];
  }
  while (track.step < step) {
    track.rate = Next(++track.step, track.rate, base_lr);
    if (track.step % kMarkSteps == 0 &&
        track.step / kMarkSteps == static_cast<int64_t>(track.marks.size())) {
      track.marks.push_back(track.rate);
    }
  }
  return track.rate;
}

}  // namespace tessera
