#include "engine/build/rate_settings.h"

#include <string>
#include <utility>
#include <vector>

#include "config/config.pb.h"
#include "optim/schedule/deepspeed_schedules.h"
#include "optim/schedule/plateau.h"
#include "optim/schedule/torch_cycles.h"
#include "optim/schedule/torch_schedules.h"
#include "optim/schedule/warmup.h"
#include "optim/schedule/warmup_stable_decay.h"

namespace tessera {
namespace {

using Params = proto::SchedulerParams;

std::unique_ptr<LrSchedule> DeepSpeedOf(const std::string& type,
                                        const Params& params, double factor) {
  using Type = DeepSpeedScheduleOptions::Type;
  DeepSpeedScheduleOptions o;
  o.type = type == "WarmupLR"         ? Type::kWarmup
           : type == "WarmupDecayLR"  ? Type::kWarmupDecay
           : type == "WarmupCosineLR" ? Type::kWarmupCosine
           : type == "OneCycle"       ? Type::kOneCycle
                                      : Type::kRangeTest;
  o.last_batch_iteration = params.last_batch_iteration();
  o.warmup_min_lr = params.warmup_min_lr() * factor;
  o.warmup_max_lr = params.warmup_max_lr() * factor;
  o.warmup_num_steps = params.warmup_num_steps();
  o.warmup_linear = params.warmup_type() == "linear";
  o.total_num_steps = params.total_num_steps();
  o.warmup_min_ratio = params.warmup_min_ratio();
  o.cos_min_ratio = params.cos_min_ratio();
  o.cycle_min_lr = params.cycle_min_lr() * factor;
  o.cycle_max_lr = params.cycle_max_lr() * factor;
  o.decay_lr_rate = params.decay_lr_rate();
  o.cycle_first_step_size = params.cycle_first_step_size();
  o.cycle_second_step_size = params.cycle_second_step_size();
  o.cycle_first_stair_count = params.cycle_first_stair_count();
  o.cycle_second_stair_count = params.cycle_second_stair_count();
  o.decay_step_size = params.decay_step_size();
  o.cycle_momentum = params.cycle_momentum();
  o.cycle_min_mom = params.cycle_min_mom();
  o.cycle_max_mom = params.cycle_max_mom();
  o.decay_mom_rate = params.decay_mom_rate();
  o.range_min_lr = params.lr_range_test_min_lr() * factor;
  o.range_step_size = params.lr_range_test_step_size();
  o.range_step_rate = params.lr_range_test_step_rate();
  o.range_staircase = params.lr_range_test_staircase();
  return std::make_unique<DeepSpeedSchedule>(o);
}

std::unique_ptr<LrSchedule> OneCycleLrOf(const Params& params, double factor) {
  OneCycleLrOptions o;
  o.max_lr = params.max_lr() * factor;
  o.total_steps = params.total_steps();
  o.pct_start = params.pct_start();
  o.linear = params.anneal_strategy() == "linear";
  o.cycle_momentum = params.cycle_momentum();
  o.base_momentum = params.base_momentum();
  o.max_momentum = params.max_momentum();
  o.div_factor = params.div_factor();
  o.final_div_factor = params.final_div_factor();
  o.three_phase = params.three_phase();
  return std::make_unique<OneCycleLr>(o);
}

std::unique_ptr<LrSchedule> CyclicLrOf(const Params& params, double factor) {
  using Mode = CyclicLrOptions::Mode;
  CyclicLrOptions o;
  o.base_lr = params.base_lr() * factor;
  o.max_lr = params.max_lr() * factor;
  o.step_size_up = params.step_size_up();
  o.step_size_down = params.step_size_down();
  o.mode = params.mode() == "triangular"    ? Mode::kTriangular
           : params.mode() == "triangular2" ? Mode::kTriangular2
                                            : Mode::kExpRange;
  o.gamma = params.gamma();
  o.cycle_momentum = params.cycle_momentum();
  o.base_momentum = params.base_momentum();
  o.max_momentum = params.max_momentum();
  return std::make_unique<CyclicLr>(o);
}

std::unique_ptr<LrSchedule> PlateauLrOf(const Params& params, double factor) {
  PlateauOptions o;
  o.max = params.mode() == "max";
  o.factor = params.factor();
  o.patience = params.patience();
  o.threshold = params.threshold();
  o.threshold_abs = params.threshold_mode() == "abs";
  o.cooldown = params.cooldown();
  o.min_lr = params.min_lr() * factor;
  o.eps = params.eps() * factor;
  return std::make_unique<PlateauLr>(o);
}

std::unique_ptr<LrSchedule> WarmupStableDecayOf(const Params& params) {
  using Shape = WarmupStableDecayOptions::Shape;
  WarmupStableDecayOptions o;
  o.warmup_num_steps = params.warmup_num_steps();
  o.decay_num_steps = params.decay_num_steps();
  o.total_num_steps = params.total_num_steps();
  o.warmup_min_ratio = params.warmup_min_ratio();
  o.decay_min_ratio = params.decay_min_ratio();
  o.shape = params.decay_type() == "linear"   ? Shape::kLinear
            : params.decay_type() == "cosine" ? Shape::kCosine
                                              : Shape::kOneMinusSqrt;
  return std::make_unique<WarmupStableDecay>(o);
}

// The schedules of torch_schedules.h; null: none of these.
std::unique_ptr<LrSchedule> TorchOf(const std::string& type, const Params& p,
                                    double factor, bool after_warmup) {
  if (type.empty()) return std::make_unique<ConstantRate>();
  if (type == "StepLR") {
    return std::make_unique<StepLr>(p.step_size(), p.gamma());
  }
  if (type == "MultiStepLR") {
    return std::make_unique<MultiStepLr>(
        std::vector<int64_t>(p.milestones().begin(), p.milestones().end()),
        p.gamma());
  }
  if (type == "ConstantLR") {
    return std::make_unique<ConstantLr>(p.factor(), p.total_iters());
  }
  if (type == "LinearLR") {
    return std::make_unique<LinearLr>(p.start_factor(), p.end_factor(),
                                      p.total_iters());
  }
  if (type == "ExponentialLR") {
    return std::make_unique<ExponentialLr>(p.gamma());
  }
  if (type == "PolynomialLR") {
    return std::make_unique<PolynomialLr>(p.total_iters(), p.power());
  }
  if (type == "CosineAnnealingLR") {
    return std::make_unique<CosineAnnealingLr>(
        p.t_max(), p.eta_min() * factor, after_warmup, p.after() == "hold");
  }
  if (type == "CosineAnnealingWarmRestarts") {
    return std::make_unique<CosineAnnealingWarmRestarts>(p.t_0(), p.t_mult(),
                                                         p.eta_min() * factor);
  }
  return nullptr;
}

std::unique_ptr<LrSchedule> WithoutWarmup(const proto::Scheduler& scheduler,
                                          double factor, bool after_warmup) {
  const std::string& type = scheduler.type();
  const Params& params = scheduler.params();
  if (auto made = TorchOf(type, params, factor, after_warmup)) return made;
  if (type == "OneCycleLR") return OneCycleLrOf(params, factor);
  if (type == "CyclicLR") return CyclicLrOf(params, factor);
  if (type == "ReduceLROnPlateau") return PlateauLrOf(params, factor);
  if (type == "WSD") return WarmupStableDecayOf(params);
  return DeepSpeedOf(type, params, factor);
}

}  // namespace

double RateFactorOf(const proto::Config& config) {
  return config.has_learning_rate_scaling()
             ? config.learning_rate_scaling().factor()
             : 1;
}

std::unique_ptr<LrSchedule> LrScheduleOf(const proto::Config& config) {
  using Shape = WarmupOptions::Shape;
  if (!config.has_optimizer() || !config.has_scheduler()) return nullptr;
  const proto::SchedulerWarmup& warmup = config.scheduler().warmup();
  const bool warms_up = warmup.num_steps() > 0;
  auto schedule =
      WithoutWarmup(config.scheduler(), RateFactorOf(config), warms_up);
  if (!warms_up) return schedule;
  WarmupOptions o;
  o.num_steps = warmup.num_steps();
  o.start_factor = warmup.start_factor();
  o.shape = warmup.shape() == "linear"        ? Shape::kLinear
            : warmup.shape() == "exponential" ? Shape::kExponential
                                              : Shape::kCosine;
  return std::make_unique<WarmupFirst>(o, std::move(schedule));
}

}  // namespace tessera
