#include "optim/schedule/torch_cycles.h"

#include <algorithm>
#include <cmath>

#include "optim/schedule/pi.h"

namespace tessera {

OneCycleLr::OneCycleLr(const OneCycleLrOptions& options) : o_(options) {
  const auto total = static_cast<double>(o_.total_steps);
  const double first = o_.max_lr / o_.div_factor;
  const double last = first / o_.final_div_factor;
  const double low = o_.base_momentum, high = o_.max_momentum;
  const Phase up = {o_.pct_start * total - 1, first, o_.max_lr, high, low};
  if (o_.three_phase) {
    phases_ = {up,
               {2 * o_.pct_start * total - 2, o_.max_lr, first, low, high},
               {total - 1, first, last, high, high}};
    num_phases_ = 3;
  } else {
    phases_ = {up, {total - 1, o_.max_lr, last, low, high}};
    num_phases_ = 2;
  }
}

// torch computes one rate more, for a step that is not meant to be made; it
// overshoots, below 0 with straight lines.
OneCycleLr::Place OneCycleLr::PlaceOf(int64_t steps_done) const {
  const auto step =
      static_cast<double>(std::min(steps_done, o_.total_steps - 1));
  double start = 0;
  size_t i = 0;
  for (; i + 1 < num_phases_ && step > phases_[i].end_step; ++i) {
    start = phases_[i].end_step;
  }
  return {phases_[i], (step - start) / (phases_[i].end_step - start)};
}

double OneCycleLr::Anneal(double start, double end, double pct) const {
  if (o_.linear) return (end - start) * pct + start;
  return end + (start - end) / 2.0 * (std::cos(kPi * pct) + 1);
}

double OneCycleLr::Rate(int64_t steps_done, double /*base_lr*/) const {
  const Place at = PlaceOf(steps_done);
  return Anneal(at.phase.start_lr, at.phase.end_lr, at.pct);
}

std::optional<LrSchedule::Betas> OneCycleLr::BetasAt(int64_t steps_done) const {
  if (!o_.cycle_momentum) return std::nullopt;
  const Place at = PlaceOf(steps_done);
  return Betas{Anneal(at.phase.start_momentum, at.phase.end_momentum, at.pct),
               std::nullopt};
}

CyclicLr::Place CyclicLr::PlaceOf(int64_t steps_done) const {
  const auto step = static_cast<double>(steps_done);
  const auto up = static_cast<double>(o_.step_size_up);
  const double size = up + static_cast<double>(o_.step_size_down);
  const double peak = up / size;
  const double cycle = std::floor(1 + step / size);
  const double x = 1.0 + step / size - cycle;
  Place place = {x <= peak ? x / peak : (x - 1) / (peak - 1), 1.0};
  if (o_.mode == CyclicLrOptions::Mode::kTriangular2) {
    place.factor = 1 / std::pow(2.0, cycle - 1);
  } else if (o_.mode == CyclicLrOptions::Mode::kExpRange) {
    place.factor = std::pow(o_.gamma, step);
  }
  return place;
}

double CyclicLr::Rate(int64_t steps_done, double /*base_lr*/) const {
  const Place at = PlaceOf(steps_done);
  return o_.base_lr + (o_.max_lr - o_.base_lr) * at.height * at.factor;
}

std::optional<LrSchedule::Betas> CyclicLr::BetasAt(int64_t steps_done) const {
  if (!o_.cycle_momentum) return std::nullopt;
  const Place at = PlaceOf(steps_done);
  return Betas{o_.max_momentum -
                   (o_.max_momentum - o_.base_momentum) * at.height * at.factor,
               std::nullopt};
}

}  // namespace tessera
