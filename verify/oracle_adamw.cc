#include "verify/oracle_adamw.h"

#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <memory>
#include <utility>

namespace tessera {
namespace {

float Rounded(double x) { return static_cast<float>(x); }

float OneNan(float x) {
  return std::isnan(x) ? std::numeric_limits<float>::quiet_NaN() : x;
}

// start + weight * (end - start), from the nearer of the two.
float Lerp(float start, float end, float weight) {
  const float way = end - start;
  return weight < 0.5f ? std::fma(weight, way, start)
                       : std::fma(weight - 1, way, end);
}

// What the elements of a step have in common.
struct Coefficients {
  Coefficients(int64_t step, const OracleAdamWOptions& o) {
    const auto steps = static_cast<double>(step);
    decay = o.weight_decay == 0 ? 1 : Rounded(1 - o.lr * o.weight_decay);
    weight = Rounded(1 - o.beta1);
    beta2 = Rounded(o.beta2);
    square_weight = Rounded(1 - o.beta2);
    correction = Rounded(std::sqrt(1 - std::pow(o.beta2, steps)));
    eps = Rounded(o.eps);
    minus_step_size = Rounded(-(o.lr / (1 - std::pow(o.beta1, steps))));
  }
  float decay, weight, beta2, square_weight, correction, eps, minus_step_size;
};

// One operation to a line: none may be fused with another.
void StepElement(float* master, float* exp_avg, float* exp_avg_sq,
                 float gradient, const Coefficients& c) {
  *master *= c.decay;
  *exp_avg = OneNan(Lerp(*exp_avg, gradient, c.weight));
  const float decayed = *exp_avg_sq * c.beta2;
  const float weighted = gradient * c.square_weight;
  *exp_avg_sq = OneNan(std::fma(gradient, weighted, decayed));
  float denominator = std::sqrt(*exp_avg_sq);
  denominator /= c.correction;
  denominator += c.eps;
  float change = c.minus_step_size * *exp_avg;
  change /= denominator;
  *master = OneNan(*master + change);
}

// torch::optim::AdamW itself, of a parameter with this state.
void TorchOptimStep(const at::Tensor& master, const at::Tensor& exp_avg,
                    const at::Tensor& exp_avg_sq, const at::Tensor& gradient,
                    int64_t step, const OracleAdamWOptions& o) {
  at::Tensor parameter = master.detach().clone();
  parameter.mutable_grad() = gradient;
  torch::optim::AdamW optimizer({parameter}, torch::optim::AdamWOptions(o.lr)
                                                 .betas({o.beta1, o.beta2})
                                                 .eps(o.eps)
                                                 .weight_decay(o.weight_decay));
  auto state = std::make_unique<torch::optim::AdamWParamState>();
  state->step(step - 1);
  state->exp_avg(exp_avg);
  state->exp_avg_sq(exp_avg_sq);
  optimizer.state()[parameter.unsafeGetTensorImpl()] = std::move(state);
  optimizer.step();
  master.copy_(parameter);
}

}  // namespace

void OracleAdamW(const at::Tensor& master, const at::Tensor& exp_avg,
                 const at::Tensor& exp_avg_sq, const at::Tensor& gradient,
                 int64_t step, const OracleAdamWOptions& o) {
  torch::NoGradGuard no_grad;
  if (o.libtorch_exact) {
    return TorchOptimStep(master, exp_avg, exp_avg_sq, gradient, step, o);
  }
  if (!master.is_cpu() || master.scalar_type() != at::kFloat) {
    at::_fused_adamw_({master}, {gradient}, {exp_avg}, {exp_avg_sq},
                      /*max_exp_avg_sqs=*/{},
                      {torch::full({}, static_cast<double>(step),
                                   at::TensorOptions(master.device()))},
                      o.lr, o.beta1, o.beta2, o.weight_decay, o.eps,
                      /*amsgrad=*/false, /*maximize=*/false);
    return;
  }
  // In one order, whatever their strides.
  const at::Tensor p = master.contiguous(), m = exp_avg.contiguous(),
                   v = exp_avg_sq.contiguous(), g = gradient.contiguous();
  float* const masters = p.data_ptr<float>();
  float* const exp_avgs = m.data_ptr<float>();
  float* const exp_avg_sqs = v.data_ptr<float>();
  const float* const gradients = g.const_data_ptr<float>();
  const Coefficients c(step, o);
  for (int64_t i = 0; i < p.numel(); ++i) {
    StepElement(masters + i, exp_avgs + i, exp_avg_sqs + i, gradients[i], c);
  }
  if (!p.is_same(master)) master.copy_(p);
  if (!m.is_same(exp_avg)) exp_avg.copy_(m);
  if (!v.is_same(exp_avg_sq)) exp_avg_sq.copy_(v);
}

}  // namespace tessera
