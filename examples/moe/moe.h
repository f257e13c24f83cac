// Moe is a small transformer whose layers are mixtures of experts, as a plain
// torch::nn::Module.
//
//   block: x += attention(norm1(x));  x += experts(norm2(x))
//   experts: of each token the router's two likeliest, weighted by their
//            probabilities, whose sum is made 1
//
// An expert runs if it has a token, so the data decide which parameters are
// used and get a gradient: it differs from rank to rank and from step to step.
// Nothing here knows that it may be trained in shards.
//
// Sources: GShard (Lepikhin et al., 2021) for two experts a token; Switch
// Transformer (Fedus et al., 2022) for the loss that balances experts.
#ifndef EXAMPLES_MOE_MOE_H_
#define EXAMPLES_MOE_MOE_H_

#include <cstdint>
#include <vector>

#include "ATen/core/Tensor.h"
#include "torch/arg.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"
#include "torch/nn/pimpl.h"

struct MoeOptions {
  TORCH_ARG(int64_t, dim) = 64;       // width; a multiple of heads
  TORCH_ARG(int64_t, layers) = 2;     // blocks
  TORCH_ARG(int64_t, heads) = 4;      // in attention
  TORCH_ARG(int64_t, experts) = 8;    // in a block; at least 2
  TORCH_ARG(int64_t, hidden) = 128;   // width of an expert
  TORCH_ARG(int64_t, seq) = 64;       // the longest input, in tokens
  TORCH_ARG(int64_t, vocab) = 256;    // one token per byte
  TORCH_ARG(double, balance) = 0.01;  // weight of the balancing loss
};

class MoeExpertImpl : public torch::nn::Module {
 public:
  MoeExpertImpl(int64_t dim, int64_t hidden);
  // Maps [tokens, dim] to [tokens, dim].
  at::Tensor forward(const at::Tensor& input);

 private:
  torch::nn::Linear up_{nullptr}, down_{nullptr};
};
TORCH_MODULE(MoeExpert);

// A router and its experts.
class MoeLayerImpl : public torch::nn::Module {
 public:
  explicit MoeLayerImpl(const MoeOptions& options);
  // Maps [tokens, dim] to [tokens, dim].
  at::Tensor forward(const at::Tensor& input);

  // Returns the balancing loss of the last forward: experts * sum over experts
  // of (share of choices) * (mean probability); it is 1 if all are chosen
  // equally often, more otherwise. It is float32, as is all that the router
  // computes, whatever the input and the parameters are: in 16 bits rounding
  // would exchange experts, and counts above 256 would be wrong.
  const at::Tensor& balance_loss() const { return balance_loss_; }
  // Returns how many choices fell on each expert.
  const std::vector<int64_t>& choices() const { return choices_; }

 private:
  MoeOptions options_;
  torch::nn::Linear router_{nullptr};
  torch::nn::ModuleList experts_{nullptr};
  at::Tensor balance_loss_;
  std::vector<int64_t> choices_;
};
TORCH_MODULE(MoeLayer);

class MoeBlockImpl : public torch::nn::Module {
 public:
  explicit MoeBlockImpl(const MoeOptions& options);
  // Maps [B, T, dim] to [B, T, dim].
  at::Tensor forward(const at::Tensor& input);
  const MoeLayerImpl& moe() const { return *moe_; }

 private:
  at::Tensor Attend(const at::Tensor& input);

  MoeOptions options_;
  torch::nn::LayerNorm norm1_{nullptr}, norm2_{nullptr};
  torch::nn::Linear qkv_{nullptr}, out_{nullptr};
  MoeLayer moe_{nullptr};
};
TORCH_MODULE(MoeBlock);

class MoeImpl : public torch::nn::Module {
 public:
  // Draws the initial values from torch's default generator.
  explicit MoeImpl(const MoeOptions& options = MoeOptions());

  // Takes `tokens` [B, T] of int64, T <= seq; returns the logits, [B, T,
  // vocab].
  at::Tensor forward(const at::Tensor& tokens);
  // Returns the mean cross entropy, in nats per token, plus `balance` times the
  // mean of the layers' balance_loss. Float32.
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets);
  // Return the two parts of the last loss, without a graph; the first is
  // comparable with other models' losses.
  const at::Tensor& cross_entropy() const { return cross_entropy_; }
  const at::Tensor& balance() const { return balance_; }

  // Returns how many experts of all layers had no token in the last forward.
  int64_t unused_experts() const;

 private:
  MoeOptions options_;
  torch::nn::Embedding token_{nullptr}, position_{nullptr};
  torch::nn::ModuleList blocks_{nullptr};
  torch::nn::LayerNorm norm_{nullptr};
  torch::nn::Linear head_{nullptr};
  at::Tensor cross_entropy_, balance_;
};
TORCH_MODULE(Moe);

#endif  // EXAMPLES_MOE_MOE_H_
