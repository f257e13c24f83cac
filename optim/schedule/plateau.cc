#include "optim/schedule/plateau.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace tessera {

Plateau::Plateau(const PlateauOptions& options) : o_(options) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  state_.best = o_.max ? -kInfinity : kInfinity;
}

bool Plateau::IsBetter(double metric) const {
  const double best = state_.best;
  if (o_.max) {
    return metric >
           (o_.threshold_abs ? best + o_.threshold : best * (o_.threshold + 1));
  }
  return metric <
         (o_.threshold_abs ? best - o_.threshold : best * (1 - o_.threshold));
}

void Plateau::Report(double metric) {
  if (IsBetter(metric)) {
    state_.best = metric;
    state_.bad_reports = 0;
  } else {
    ++state_.bad_reports;
  }
  if (state_.cooldown_left > 0) {
    --state_.cooldown_left;
    state_.bad_reports = 0;
  }
  if (state_.bad_reports <= o_.patience) return;
  ++state_.reductions;
  state_.cooldown_left = o_.cooldown;
  state_.bad_reports = 0;
}

bool Plateau::IsPossible(const PlateauState& state) {
  return !std::isnan(state.best) && state.bad_reports >= 0 &&
         state.cooldown_left >= 0 && state.reductions >= 0;
}

double PlateauLr::Rate(int64_t /*steps_done*/, double base_lr) const {
  double rate = base_lr;
  for (int64_t i = 0; i < plateau_.state().reductions; ++i) {
    const double reduced = std::max(rate * o_.factor, o_.min_lr);
    if (!(rate - reduced > o_.eps)) break;  // nor will the next ones
    rate = reduced;
  }
  return rate;
}

}  // namespace tessera
