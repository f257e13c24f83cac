// Schedules of torch.optim.lr_scheduler (2.11), by its names, parameters and
// defaults; as scheduler.step() after each optimizer.step() sets them. Each
// multiplies or anneals every group's own rate. Parameters have to be such as
// torch accepts (config/validate_scheduler.cc checks them).
//
// `after_warmup`: the second of torch's SequentialLR, which begins schedules
// that have a closed form by that, with other roundings.
//
// Sources: Loshchilov & Hutter, "SGDR", 2017 (cosine annealing, restarts); the
// others are torch's own.
#ifndef OPTIM_SCHEDULE_TORCH_SCHEDULES_H_
#define OPTIM_SCHEDULE_TORCH_SCHEDULES_H_

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "optim/schedule/lr_schedule.h"
#include "optim/schedule/recursive_schedule.h"

namespace tessera {

// The group's own rate.
class ConstantRate : public LrSchedule {
 public:
  double Rate(int64_t /*steps_done*/, double base_lr) const override {
    return base_lr;
  }
};

// Times gamma every step_size steps.
class StepLr : public RecursiveSchedule {
 public:
  StepLr(int64_t step_size, double gamma)
      : step_size_(step_size), gamma_(gamma) {}

 private:
  double First(double base_lr) const override { return base_lr; }
  double Next(int64_t step, double last, double base_lr) const override {
    return step % step_size_ == 0 ? last * gamma_ : last;
  }

  int64_t step_size_;
  double gamma_;
};

// Times gamma at each milestone.
class MultiStepLr : public RecursiveSchedule {
 public:
  // `milestones` ascend; of equal ones each counts.
  MultiStepLr(std::vector<int64_t> milestones, double gamma)
      : milestones_(std::move(milestones)), gamma_(gamma) {}

 private:
  double First(double base_lr) const override { return Next(0, base_lr, 0); }
  double Next(int64_t step, double last, double base_lr) const override;
  int64_t LastChange() const override {
    return milestones_.empty() ? 0 : milestones_.back();
  }

  std::vector<int64_t> milestones_;
  double gamma_;
};

// Times factor until total_iters.
class ConstantLr : public RecursiveSchedule {
 public:
  ConstantLr(double factor, int64_t total_iters)
      : factor_(factor), total_iters_(total_iters) {}

 private:
  double First(double base_lr) const override { return base_lr * factor_; }
  double Next(int64_t step, double last, double base_lr) const override {
    return step == total_iters_ ? last * (1.0 / factor_) : last;
  }
  int64_t LastChange() const override { return total_iters_; }

  double factor_;
  int64_t total_iters_;
};

// Times start_factor, and in a straight line to end_factor at total_iters.
class LinearLr : public RecursiveSchedule {
 public:
  LinearLr(double start_factor, double end_factor, int64_t total_iters)
      : start_factor_(start_factor),
        end_factor_(end_factor),
        total_iters_(total_iters) {}

 private:
  double First(double base_lr) const override {
    return base_lr * start_factor_;
  }
  double Next(int64_t step, double last, double base_lr) const override;
  int64_t LastChange() const override { return total_iters_; }

  double start_factor_, end_factor_;
  int64_t total_iters_;
};

// Times gamma at each step.
class ExponentialLr : public RecursiveSchedule {
 public:
  explicit ExponentialLr(double gamma) : gamma_(gamma) {}

 private:
  double First(double base_lr) const override { return base_lr; }
  double Next(int64_t /*step*/, double last,
              double /*base_lr*/) const override {
    return last * gamma_;
  }

  double gamma_;
};

// Times (1 - step / total_iters)^power.
class PolynomialLr : public RecursiveSchedule {
 public:
  PolynomialLr(int64_t total_iters, double power)
      : total_iters_(total_iters), power_(power) {}

 private:
  double First(double base_lr) const override { return base_lr; }
  double Next(int64_t step, double last, double base_lr) const override;
  int64_t LastChange() const override { return total_iters_; }

  int64_t total_iters_;
  double power_;
};

// Half a cosine down to eta_min at T_max, and up again, and so on; or, which
// torch does not have, it stays there (`holds`).
class CosineAnnealingLr : public RecursiveSchedule {
 public:
  CosineAnnealingLr(int64_t t_max, double eta_min, bool after_warmup,
                    bool holds)
      : t_max_(t_max),
        eta_min_(eta_min),
        after_warmup_(after_warmup),
        holds_(holds) {}
  std::optional<int64_t> RisesAfter() const override {
    return holds_ ? std::nullopt : std::make_optional(t_max_);
  }

 private:
  double First(double base_lr) const override;
  double Next(int64_t step, double last, double base_lr) const override;
  int64_t LastChange() const override { return holds_ ? t_max_ : INT64_MAX; }

  int64_t t_max_;
  double eta_min_;
  bool after_warmup_, holds_;
};

// Half a cosine down to eta_min, again and again, each T_mult times as long.
class CosineAnnealingWarmRestarts : public LrSchedule {
 public:
  CosineAnnealingWarmRestarts(int64_t t_0, int64_t t_mult, double eta_min)
      : t_0_(t_0), t_mult_(t_mult), eta_min_(eta_min) {}
  double Rate(int64_t steps_done, double base_lr) const override;

 private:
  int64_t t_0_, t_mult_;
  double eta_min_;
};

}  // namespace tessera
#endif  // OPTIM_SCHEDULE_TORCH_SCHEDULES_H_
