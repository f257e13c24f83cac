// What benchmarks/host_cost trains, and how plain libtorch does it.
#ifndef BENCHMARKS_PLAIN_TRAINING_H_
#define BENCHMARKS_PLAIN_TRAINING_H_

#include <torch/torch.h>

#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "torch/csrc/autograd/engine.h"

namespace tessera {

inline constexpr double kLr = 1e-3, kWeightDecay = 0.1;

// A block of a transformer: 12 parameters.
struct Block : torch::nn::Module {
  explicit Block(int64_t dim)
      : norm1(register_module("norm1", Norm(dim))),
        qkv(register_module("qkv", torch::nn::Linear(dim, 3 * dim))),
        proj(register_module("proj", torch::nn::Linear(dim, dim))),
        norm2(register_module("norm2", Norm(dim))),
        up(register_module("up", torch::nn::Linear(dim, 4 * dim))),
        down(register_module("down", torch::nn::Linear(4 * dim, dim))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto qkv_of_x = qkv(norm1(x)).chunk(3, -1);
    const at::Tensor attention =
        torch::softmax(qkv_of_x[0].matmul(qkv_of_x[1].t()), -1);
    const at::Tensor y = x + proj(attention.matmul(qkv_of_x[2]));
    return y + down(torch::gelu(up(norm2(y))));
  }
  static torch::nn::LayerNorm Norm(int64_t dim) {
    return torch::nn::LayerNorm(torch::nn::LayerNormOptions({dim}));
  }
  torch::nn::LayerNorm norm1;
  torch::nn::Linear qkv, proj;
  torch::nn::LayerNorm norm2;
  torch::nn::Linear up, down;
};

struct Blocks : torch::nn::Module {
  Blocks(int64_t num_blocks, int64_t dim) {
    torch::manual_seed(1);
    for (int64_t i = 0; i < num_blocks; ++i) {
      blocks.push_back(register_module(absl::StrCat("block", i),
                                       std::make_shared<Block>(dim)));
    }
    input = torch::randn({8, dim});
  }
  at::Tensor Loss() {
    at::Tensor x = input;
    for (const auto& block : blocks) x = block->forward(x);
    return x.square().mean();
  }
  std::vector<std::shared_ptr<Block>> blocks;
  at::Tensor input;
};

// While it lives, libtorch's own autograd engine, without the hooks of ours.
class PlainAutograd {
 public:
  PlainAutograd() {
    Ours() = &torch::autograd::Engine::get_default_engine();
    torch::autograd::set_default_engine_stub(
        &torch::autograd::Engine::get_base_engine);
  }
  ~PlainAutograd() {
    torch::autograd::set_default_engine_stub(
        []() -> torch::autograd::Engine& { return *Ours(); });
  }
  PlainAutograd(const PlainAutograd&) = delete;
  PlainAutograd& operator=(const PlainAutograd&) = delete;

 private:
  static torch::autograd::Engine*& Ours() {
    static torch::autograd::Engine* engine = nullptr;
    return engine;
  }
};

// Plain libtorch's training, as torch.optim.AdamW(fused=True) does it.
class PlainTraining {
 public:
  explicit PlainTraining(std::shared_ptr<Blocks> model)
      : model_(std::move(model)), parameters_(model_->parameters()) {
    for (const at::Tensor& p : parameters_) {
      exp_avgs_.push_back(torch::zeros_like(p));
      exp_avg_sqs_.push_back(torch::zeros_like(p));
      steps_.push_back(torch::zeros({}));
    }
  }

  void Step() {
    model_->Loss().backward();
    torch::NoGradGuard no_grad;
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& p : parameters_) gradients.push_back(p.grad());
    at::_foreach_add_(steps_, 1);
    at::_fused_adamw_(parameters_, gradients, exp_avgs_, exp_avg_sqs_, {},
                      steps_, kLr, 0.9, 0.999, kWeightDecay, 1e-8,
                      /*amsgrad=*/false, /*maximize=*/false);
    for (at::Tensor& p : parameters_) p.mutable_grad().reset();
  }

 private:
  std::shared_ptr<Blocks> model_;
  std::vector<at::Tensor> parameters_, exp_avgs_, exp_avg_sqs_, steps_;
};

}  // namespace tessera
#endif  // BENCHMARKS_PLAIN_TRAINING_H_
