// AverageWeights: weights of the average of schedule-free AdamW, which the
// parameters of one group share.
//
//   weight  of the group's step k: k^r * largest_rate^weight_lr_power, with the
//           largest rate of its steps so far
//   share   of z in x after that step: weight / the sum of all so far; 0 where
//           that is 0 (rates of 0)
#ifndef OPTIM_ALGORITHMS_AVERAGE_WEIGHTS_H_
#define OPTIM_ALGORITHMS_AVERAGE_WEIGHTS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "optim/algorithms/optimizer_options.h"

namespace tessera {

struct AverageWeights {
  int64_t steps = 0;  // in which a parameter of the group had a gradient
  double sum = 0;
  double largest_rate = 0;

  // The weight, and the share, of the next step with these options.
  double WeightOf(const OptimizerOptions& o) const {
    return std::pow(static_cast<double>(steps + 1), o.r) *
           std::pow(std::max(o.lr, largest_rate), o.weight_lr_power);
  }
  double ShareOf(const OptimizerOptions& o) const {
    const double weight = WeightOf(o), total = sum + weight;
    return total > 0 ? weight / total : 0;
  }
  // Returns the state after that step.
  AverageWeights After(const OptimizerOptions& o) const {
    return {steps + 1, sum + WeightOf(o), std::max(o.lr, largest_rate)};
  }

  friend bool operator==(const AverageWeights& a, const AverageWeights& b) {
    return a.steps == b.steps && a.sum == b.sum &&
           a.largest_rate == b.largest_rate;
  }
};

}  // namespace tessera
#endif  // OPTIM_ALGORITHMS_AVERAGE_WEIGHTS_H_
