// One step of an optimizer of a whole parameter as the oracle works it out:
// element by element, slow and obvious. What it computes:
// verify/oracle_formulas.h.
//
// bfloat16 states of float32 masters: computed in float32 and rounded to the
// neighbour further from zero where the 16 bits that are lost and 16 random
// ones (below) carry, else to the other.
//
//   seed     mix(mix(parameter + 0x9e3779b97f4a7c15) ^ step), mix that of
//            splitmix64
//   random   of an element's number: 32 bits; the first state has the lower 16,
//            the second the upper, the third those in the middle
//
// Masters of 16 bits: values of that dtype in a tensor of float32
// (OracleRoundMaster), rounded in the same way, of other random numbers.
#ifndef VERIFY_ORACLE_STEP_H_
#define VERIFY_ORACLE_STEP_H_

#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"

namespace tessera {

struct OracleStepOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  // torch::optim::AdamW itself, of AdamW.
  bool libtorch_exact = false;
  // libtorch's fused kernel itself, of AdamW.
  bool libtorch_fused = false;
  // As optimizer.type of a configuration; "Adam" adds weight decay to
  // gradients.
  std::string algorithm = "AdamW";
  bool bf16_states = false;  // of masters that are stepped in float32
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
  double min_coeff = 0.01, max_coeff = 10;  // of Lamb
  // Muon has Newton-Schulz steps, on the Gram matrix or not, and rates that may
  // match AdamW's.
  int64_t ns_steps = 5;
  bool ns_gram = false;
  bool match_rms_adamw = false;
  // Schedule-free AdamW has these; the share is the step's (OracleAverages).
  double r = 0, weight_lr_power = 2, average_share = 1;
  // Adafactor has these; an eps of 0 is the masters' epsilon.
  double eps2 = 1e-3, beta2_decay = -0.8, d = 1;
};

// The averages that schedule-free AdamW keeps, of each group: what part of them
// the step's z is. Of step k the weight is k^r times the largest rate so far to
// weight_lr_power, the part that over the sum of all.
class OracleAverages {
 public:
  // In this step, which counts for the groups that are asked for.
  double Share(std::optional<size_t> group, const OracleStepOptions& o) {
    OfGroup& of = groups_[group];
    if (of.counted) return of.share;
    of.counted = true;
    of.steps += 1;
    if (o.lr > of.largest) of.largest = o.lr;
    const double weight =
        std::pow(of.steps, o.r) * std::pow(of.largest, o.weight_lr_power);
    of.total += weight;
    of.share = of.total == 0 ? 0 : weight / of.total;
    return of.share;
  }
  void EndStep() {
    for (auto& [group, of] : groups_) of.counted = false;
  }

 private:
  struct OfGroup {
    bool counted = false;
    double steps = 0, largest = 0, total = 0, share = 0;
  };
  std::map<std::optional<size_t>, OfGroup> groups_;
};

// Whether there is such an algorithm.
bool OracleKnows(const std::string& algorithm);

// AdamW without amsgrad and maximize, and with bias correction.
bool IsPlainAdamW(const OracleStepOptions& options);

// Whether the step is libtorch's at::_fused_adamw_ where `device` is: as the
// engine chooses it (base/torch/step_arithmetic.h), of plain AdamW whose
// masters are float64, unless `elementwise`, or on a device without kernels of
// ours, unless states are bfloat16.
bool OracleCallsFusedAdamW(c10::DeviceType device, at::ScalarType masters,
                           const OracleStepOptions& options,
                           bool elementwise = false);

// What random bits are a function of, besides the step.
struct OracleRandom {
  int64_t parameter = 0;  // its number in the model
  // Of each element, int64: its place in memory, from the parameter's first.
  // Undefined: in order of indices.
  at::Tensor numbers;
};

// Where a parameter's elements lie in their storage: of Lamb and Adafactor,
// whose norms are sums of blocks there (verify/oracle_norm.h).
struct OraclePlace {
  std::vector<int64_t> strides;  // empty: contiguous
  int64_t offset = 0;
};

// After the step of that number: a master of float32 to values of bfloat16 or
// float16, by the lower bits of `random`, as many as are lost; its seed is
// xored with 0xd1b54a32d192ed03. A float16 below 2^-32 is 0.
void OracleRoundMaster(const at::Tensor& master, at::ScalarType dtype,
                       int64_t step, const OracleRandom& random);

// Returns a master of float32 in bfloat16, to the nearest, half away from zero.
at::Tensor OracleRoundTiesAway(const at::Tensor& master);

// Zeros, of the shape of `master`, real; Adafactor's have shapes of their own.
std::vector<at::Tensor> OracleStates(const at::Tensor& master,
                                     const OracleStepOptions& options);

// Tensors of one shape (states: see above); masters and gradients of one dtype,
// real. `states`: as of OracleStates. `step` counts from 1. By the formulas, on
// the CPU; but with libtorch_exact by torch::optim::AdamW, and by
// at::_fused_adamw_ where OracleCallsFusedAdamW.
void OracleStep(const at::Tensor& master, const std::vector<at::Tensor>& states,
                const at::Tensor& gradient, int64_t step,
                const OracleStepOptions& options,
                const OracleRandom& random = {}, bool elementwise = false,
                const OraclePlace& place = {});

}  // namespace tessera
#endif  // VERIFY_ORACLE_STEP_H_
