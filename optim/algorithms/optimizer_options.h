// OptimizerOptions: the algorithm of one group of parameters and its
// hyperparameters, named as in PyTorch and DeepSpeed. An algorithm's row
// (optim/algorithms/algorithm.h) says which of them it has, and their ranges.
#ifndef OPTIM_ALGORITHMS_OPTIMIZER_OPTIONS_H_
#define OPTIM_ALGORITHMS_OPTIMIZER_OPTIONS_H_

#include <cstdint>
#include <memory>
#include <tuple>

#include "optim/algorithms/table.h"

namespace tessera {

struct CustomOptimizer;  // optim/custom/custom_optimizer.h

// How states are kept; those of float64 masters are float64. The last two kinds
// are rounded stochastically (optim/kernels/element_step.h).
//
//   kFloat32   as computed
//   kBFloat16  16 bits each
//   kBlock8    8 bits each, and the largest of 64 (optim/kernels/block8.h)
enum class StateType : uint8_t { kFloat32, kBFloat16, kBlock8 };

struct OptimizerOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;  // Adafactor: 0 is the masters' epsilon
  double weight_decay = 0;
  // AdamW: gives the bits of the class of torch::optim, operator by operator.
  bool libtorch_exact = false;
  // AdamW: gives the bits of libtorch's fused kernel in every element.
  bool libtorch_fused = false;
  Algorithm algorithm = Algorithm::kAdamW;
  StateType states = StateType::kFloat32;
  bool bias_correction = true;
  bool amsgrad = false;
  double momentum = 0;
  double dampening = 0;
  bool nesterov = false;
  double alpha = 0.99;
  bool centered = false;
  double lr_decay = 0;
  double initial_accumulator_value = 0;
  bool maximize = false;
  // Above 0: the decay of an exponential moving average of the masters, which
  // is kept as the state "ema".
  double ema_decay = 0;
  double min_coeff = 0.01;  // LAMB: of the trust ratio, at least
  double max_coeff = 10;    // LAMB: at most
  // Muon: see optim/matrix/newton_schulz.h.
  int64_t ns_steps = 5;
  bool ns_gram = false;
  bool match_rms_adamw = false;
  // Schedule-free AdamW (optim/algorithms/average_weights.h):
  double r = 0;
  double weight_lr_power = 2;
  double average_share = 1;  // of the step: its optimizer sets it
  // The program's own optimizer and its number of states; null: it is not one.
  std::shared_ptr<const CustomOptimizer> custom;
  int custom_states = 0;
  // Adafactor: the least root mean square of a parameter; the exponent of the
  // second moments' decay; the greatest root mean square of a change.
  double eps2 = 1e-3;
  double beta2_decay = -0.8;
  double d = 1;

  // All options, for comparison.
  auto Tied() const {
    return std::tie(lr, beta1, beta2, eps, weight_decay, libtorch_exact,
                    libtorch_fused, algorithm, states, bias_correction, amsgrad,
                    momentum, dampening, nesterov, alpha, centered, lr_decay,
                    initial_accumulator_value, maximize, ema_decay, min_coeff,
                    max_coeff, ns_steps, ns_gram, match_rms_adamw, r,
                    weight_lr_power, average_share, custom, custom_states, eps2,
                    beta2_decay, d);
  }
  friend bool operator==(const OptimizerOptions& a, const OptimizerOptions& b) {
    return a.Tied() == b.Tied();
  }
};

}  // namespace tessera
#endif  // OPTIM_ALGORITHMS_OPTIMIZER_OPTIONS_H_
