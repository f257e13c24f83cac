// OptimizerOptions: which algorithm, and its hyperparameters: those of one
// group of parameters. Names as PyTorch's and DeepSpeed's; not all are of every
// algorithm.
#ifndef OPTIM_KERNELS_OPTIMIZER_OPTIONS_H_
#define OPTIM_KERNELS_OPTIMIZER_OPTIONS_H_

#include <cstdint>
#include <memory>

namespace tessera {

struct CustomOptimizer;  // optim/custom/custom_optimizer.h

// What it computes: optim/kernels/formulas.h.
enum class Algorithm : uint8_t {
  kAdamW,  // weight decay of the weights
  kAdam,   // weight decay added to the gradient (L2), as of all below but Lion
  kSgd,    // with momentum, Nesterov's too
  kAdagrad,
  kRmsProp,
  kLion,
  // Whose change of a parameter depends on all of it (optim/directed_step.h):
  kLamb,
  kMuon,          // of matrices
  kAdafactor,     // optim/factored/adafactor.h
  kScheduleFree,  // AdamW; weight decay as AdamW's, where gradients are taken
  // A program's own (optim/custom), which is given all options; and such a one
  // that is given the rate alone:
  kCustom,
  kCustomOfRate,
};

// What states are kept in; those of float64 masters are float64. The last two
// are rounded stochastically (optim/kernels/element_step.h).
//
//   kFloat32   as computed
//   kBFloat16  16 bits each
//   kBlock8    8 bits each, and the largest of 64 (optim/kernels/block8.h)
enum class StateType : uint8_t { kFloat32, kBFloat16, kBlock8 };

struct OptimizerOptions {
  double lr = 1e-3;
  double beta1 = 0.9;    // AdamW, schedule-free too, Adam, Lion, LAMB
  double beta2 = 0.999;  // the same
  // The same but Lion, Adagrad, RMSprop; Adafactor: 0 is the masters' epsilon.
  double eps = 1e-8;
  double weight_decay = 0;
  // The bits of the class of torch::optim instead, operator by operator. AdamW.
  bool libtorch_exact = false;
  // The bits of libtorch's fused kernel in every element. AdamW.
  bool libtorch_fused = false;
  Algorithm algorithm = Algorithm::kAdamW;
  StateType states = StateType::kFloat32;
  bool bias_correction = true;           // AdamW, Adam
  bool amsgrad = false;                  // AdamW, Adam
  double momentum = 0;                   // SGD, RMSprop
  double dampening = 0;                  // SGD
  bool nesterov = false;                 // SGD
  double alpha = 0.99;                   // RMSprop
  bool centered = false;                 // RMSprop
  double lr_decay = 0;                   // Adagrad
  double initial_accumulator_value = 0;  // Adagrad
  bool maximize = false;
  // Above 0: of the exponential moving average of the masters that is kept
  // beside them, the state "ema".
  double ema_decay = 0;
  double min_coeff = 0.01;  // LAMB: of the trust ratio, at least
  double max_coeff = 10;    // LAMB: at most
  // Muon: see optim/matrix/newton_schulz.h.
  int64_t ns_steps = 5;
  bool ns_gram = false;
  bool match_rms_adamw = false;
  // Schedule-free AdamW (optim/kernels/schedule_free.h):
  double r = 0;
  double weight_lr_power = 2;
  double average_share = 1;  // of the step: its optimizer sets it
  // A program's own, and its number of states; null: another.
  std::shared_ptr<const CustomOptimizer> custom;
  int custom_states = 0;
  // Adafactor: of a parameter's root mean square, at least; of the second
  // moments' decay, an exponent; of a change's root mean square, at most.
  double eps2 = 1e-3;
  double beta2_decay = -0.8;
  double d = 1;

  friend bool operator==(const OptimizerOptions& a, const OptimizerOptions& b) {
    return a.lr == b.lr && a.beta1 == b.beta1 && a.beta2 == b.beta2 &&
           a.eps == b.eps && a.weight_decay == b.weight_decay &&
           a.libtorch_exact == b.libtorch_exact &&
           a.libtorch_fused == b.libtorch_fused && a.algorithm == b.algorithm &&
           a.states == b.states && a.bias_correction == b.bias_correction &&
           a.amsgrad == b.amsgrad && a.momentum == b.momentum &&
           a.dampening == b.dampening && a.nesterov == b.nesterov &&
           a.alpha == b.alpha && a.centered == b.centered &&
           a.lr_decay == b.lr_decay &&
           a.initial_accumulator_value == b.initial_accumulator_value &&
           a.maximize == b.maximize && a.ema_decay == b.ema_decay &&
           a.min_coeff == b.min_coeff && a.max_coeff == b.max_coeff &&
           a.ns_steps == b.ns_steps && a.ns_gram == b.ns_gram &&
           a.match_rms_adamw == b.match_rms_adamw && a.r == b.r &&
           a.weight_lr_power == b.weight_lr_power &&
           a.average_share == b.average_share && a.custom == b.custom &&
           a.custom_states == b.custom_states && a.eps2 == b.eps2 &&
           a.beta2_decay == b.beta2_decay && a.d == b.d;
  }
};

}  // namespace tessera
#endif  // OPTIM_KERNELS_OPTIMIZER_OPTIONS_H_
