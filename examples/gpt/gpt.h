// Gpt is a byte-level GPT as a plain torch::nn::Module.
//
//   tokens [B, T] -> token + position embedding -> layers x block -> norm ->
//   head block: x += out(attention(norm1(x)));  x += down(gelu(up(norm2(x))))
//
// The vocabulary is the 256 bytes, so any file is a text. Nothing in here knows
// that it may be trained in shards, which is what the example shows. With
// Gpt2() it is the model of Hugging Face's GPT2LMHeadModel, whose files it
// loads and saves by the NameMap "gpt2".
//
// Source: GPT-2 (Radford et al., 2019) for the shape and the initial values.
#ifndef EXAMPLES_GPT_GPT_H_
#define EXAMPLES_GPT_GPT_H_

#include <cstdint>

#include "ATen/core/Tensor.h"
#include "torch/arg.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"
#include "torch/nn/pimpl.h"

// The default sizes make 10.9 million parameters.
struct GptOptions {
  TORCH_ARG(int64_t, dim) = 384;       // width; a multiple of heads
  TORCH_ARG(int64_t, layers) = 6;      // blocks
  TORCH_ARG(int64_t, heads) = 6;       // attention heads of a block
  TORCH_ARG(int64_t, seq) = 128;       // the longest input, in tokens
  TORCH_ARG(int64_t, vocab) = 256;     // one token per byte
  TORCH_ARG(double, dropout) = 0;      // of embeddings and both block outputs
  TORCH_ARG(bool, gelu_tanh) = false;  // by tanh; transformers' "gelu_new"
  TORCH_ARG(bool, tied) = false;       // the head is the token embedding

 public:
  // Selects the activation and the head of GPT-2.
  GptOptions& Gpt2() { return gelu_tanh(true).tied(true); }
};

// One block of the transformer, norms first.
class GptBlockImpl : public torch::nn::Module {
 public:
  explicit GptBlockImpl(const GptOptions& options);
  // Maps [B, T, dim] to [B, T, dim].
  at::Tensor forward(const at::Tensor& input);

 private:
  at::Tensor Attend(const at::Tensor& input);

  GptOptions options_;
  torch::nn::LayerNorm norm1_{nullptr}, norm2_{nullptr};
  torch::nn::Linear qkv_{nullptr}, out_{nullptr}, up_{nullptr}, down_{nullptr};
};
TORCH_MODULE(GptBlock);

class GptImpl : public torch::nn::Module {
 public:
  // Draws the initial values from torch's default generator: the same seed
  // gives the same model. Throws if heads do not divide dim.
  explicit GptImpl(const GptOptions& options = GptOptions());

  // Takes `tokens` [B, T] of int64, T <= seq; returns the logits, [B, T,
  // vocab], which are at::linear(hidden(tokens), head_weight()).
  at::Tensor forward(const at::Tensor& tokens);

  // Returns what the head gets, [B, T, dim].
  at::Tensor hidden(const at::Tensor& tokens);
  const at::Tensor& head_weight() const;  // [vocab, dim]

  // Returns the mean cross entropy, in nats per byte, of predicting targets [B,
  // T].
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets);

  const GptOptions& options() const { return options_; }

 private:
  void InitializeWeights();

  GptOptions options_;
  torch::nn::Embedding token_{nullptr}, position_{nullptr};
  torch::nn::ModuleList blocks_{nullptr};
  torch::nn::LayerNorm norm_{nullptr};
  torch::nn::Linear head_{nullptr};  // none if tied
};
TORCH_MODULE(Gpt);

#endif  // EXAMPLES_GPT_GPT_H_
