#include "optim/schedule/loss_scaler.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace tessera {
namespace {

constexpr double kMaxScale = 0x1p127;

bool IsScale(double value) { return 0 < value && value <= kMaxScale; }

template <typename T>
absl::Status BadOption(absl::string_view name, absl::string_view expected,
                       T got) {
  return absl::InvalidArgumentError(
      absl::StrCat("fp16.", name, ": expected ", expected, ", got ", got));
}

template <typename T>
absl::Status BadState(absl::string_view name, absl::string_view expected,
                      T got) {
  return absl::DataLossError(absl::StrCat(
      "loss scaler's saved state: ", name, ": expected ", expected, ", got ",
      got, "; take another checkpoint, or start with a new scaler"));
}

absl::Status CheckOptions(const LossScalerOptions& o) {
  if (o.static_scale != 0) {
    if (IsScale(o.static_scale)) return absl::OkStatus();
    return BadOption("loss_scale", "0 (dynamic) or a scale of at most 2^127",
                     o.static_scale);
  }
  if (!IsScale(o.min_scale)) {
    return BadOption("min_loss_scale", "a positive scale of at most 2^127",
                     o.min_scale);
  }
  const double initial = std::ldexp(1, o.initial_scale_power);
  if (!(o.min_scale <= initial && initial <= kMaxScale)) {
    return BadOption("initial_scale_power",
                     absl::StrCat("at most 127, and 2^this to be at least "
                                  "min_loss_scale, ",
                                  o.min_scale),
                     o.initial_scale_power);
  }
  if (o.window < 1) {
    return BadOption("loss_scale_window", "at least 1 step", o.window);
  }
  if (o.hysteresis < 1) {
    return BadOption("hysteresis",
                     "at least 1, which halves at every overflow (DeepSpeed "
                     "takes 0 too, and then never halves)",
                     o.hysteresis);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<LossScaler> LossScaler::Create(
    const LossScalerOptions& options) {
  absl::Status status = CheckOptions(options);
  if (!status.ok()) return status;
  return LossScaler(options);
}

LossScaler::LossScaler(const LossScalerOptions& options) : options_(options) {
  state_.scale = dynamic() ? std::ldexp(1, options.initial_scale_power)
                           : options.static_scale;
  state_.hysteresis_left = options.hysteresis;
}

// Why so. A scale that is too high costs a step each time it overflows, one
// that is too low silently turns small gradients into zeros, so it is raised
// until it overflows and then lowered. Three rules keep that from going wrong:
//  - hysteresis: one batch with an outlier costs a step, not half of the scale
//    for the next `window` steps.
//  - clean_steps starts again at an overflow: the scale would otherwise double
//    although every few steps overflow.
//  - an overflow at min_scale is an error. No scale helps then, and a run that
//    went on would skip all further steps and look alive.
absl::Status LossScaler::Update(bool overflow) {
  if (overflow) ++state_.skipped_steps;
  if (!dynamic()) return absl::OkStatus();
  if (overflow) return Overflow();
  CleanStep();
  return absl::OkStatus();
}

absl::Status LossScaler::Overflow() {
  if (state_.hysteresis_left > 1) {
    --state_.hysteresis_left;
  } else if (state_.scale > options_.min_scale) {
    state_.scale = std::max(state_.scale / 2, options_.min_scale);
  } else {
    return absl::OutOfRangeError(absl::StrCat(
        "loss scale: gradients still overflow at fp16.min_loss_scale, ",
        options_.min_scale, ", after ", state_.skipped_steps,
        " skipped steps: they are probably infinite or NaN without any scale; "
        "look for the first loss that is not finite, lower the learning rate "
        "or clip gradients, use bf16, or lower fp16.min_loss_scale"));
  }
  state_.clean_steps = 0;
  return absl::OkStatus();
}

void LossScaler::CleanStep() {
  const bool doubles = ++state_.clean_steps >= options_.window;
  if (doubles || options_.consecutive_hysteresis) {
    state_.hysteresis_left = options_.hysteresis;
  }
  if (!doubles) return;
  state_.clean_steps = 0;
  if (IsScale(state_.scale * 2)) state_.scale *= 2;
}

absl::Status LossScaler::Restore(const LossScalerState& state) {
  // All checks come first: a state that is half taken over belongs to no run.
  if (!IsScale(state.scale)) {
    return BadState("scale", "a positive number of at most 2^127", state.scale);
  }
  if (state.clean_steps < 0) {
    return BadState("clean_steps", "at least 0", state.clean_steps);
  }
  if (state.hysteresis_left < 1) {
    return BadState("hysteresis_left", "at least 1", state.hysteresis_left);
  }
  if (state.skipped_steps < 0) {
    return BadState("skipped_steps", "at least 0", state.skipped_steps);
  }
  const double scale = dynamic() ? std::max(state.scale, options_.min_scale)
                                 : options_.static_scale;
  state_ = state;
  state_.scale = scale;
  state_.hysteresis_left = std::min(state.hysteresis_left, options_.hysteresis);
  return absl::OkStatus();
}

}  // namespace tessera
