// Trains with libtorch alone, for comparison with ours.
#ifndef BENCHMARKS_GPT_PLAIN_LIBTORCH_H_
#define BENCHMARKS_GPT_PLAIN_LIBTORCH_H_

#include <torch/torch.h>

#include <utility>
#include <vector>

namespace tessera {

// PlainAdamW is torch.optim.AdamW(fused=True) with zero_grad(set_to_none=True).
class PlainAdamW {
 public:
  PlainAdamW(std::vector<at::Tensor> parameters, double lr, double weight_decay)
      : parameters_(std::move(parameters)),
        lr_(lr),
        weight_decay_(weight_decay) {
    for (const at::Tensor& p : parameters_) {
      exp_avgs_.push_back(torch::zeros_like(p));
      exp_avg_sqs_.push_back(torch::zeros_like(p));
      steps_.push_back(torch::zeros({}, p.device()));
    }
  }

  const std::vector<at::Tensor>& parameters() const { return parameters_; }

  // Steps with the parameters' gradients and frees them.
  void Step() {
    torch::NoGradGuard no_grad;
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& p : parameters_) gradients.push_back(p.grad());
    at::_foreach_add_(steps_, 1);
    at::_fused_adamw_(parameters_, gradients, exp_avgs_, exp_avg_sqs_, {},
                      steps_, lr_, 0.9, 0.999, weight_decay_, 1e-8,
                      /*amsgrad=*/false, /*maximize=*/false);
    for (at::Tensor& p : parameters_) p.mutable_grad().reset();
  }

 private:
  std::vector<at::Tensor> parameters_, exp_avgs_, exp_avg_sqs_, steps_;
  const double lr_, weight_decay_;
};

}  // namespace tessera
#endif  // BENCHMARKS_GPT_PLAIN_LIBTORCH_H_
