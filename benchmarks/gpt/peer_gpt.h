// PeerGpt is the GPT of the programs that run other engines on the same work:
// the same modules in the same order, so that one seed gives one set of
// weights.
#ifndef BENCHMARKS_GPT_PEER_GPT_H_
#define BENCHMARKS_GPT_PEER_GPT_H_

#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace tessera {

struct PeerGptOptions {
  int64_t dim = 512, layers = 8, heads = 8, seq = 256;
  static constexpr int64_t kVocabulary = 256;  // bytes
};

// Names are those of the peers' state dict.
struct PeerBlock : torch::nn::Module {
  PeerBlock(int64_t dim, int64_t heads)
      : heads(heads),
        n1(register_module("n1", Norm(dim))),
        qkv(register_module("qkv", torch::nn::Linear(dim, 3 * dim))),
        o(register_module("o", torch::nn::Linear(dim, dim))),
        n2(register_module("n2", Norm(dim))),
        f1(register_module("f1", torch::nn::Linear(dim, 4 * dim))),
        f2(register_module("f2", torch::nn::Linear(4 * dim, dim))) {}

  // Maps [batch, length, dim] to the same shape.
  at::Tensor forward(const at::Tensor& input) {
    const int64_t batch = input.size(0), length = input.size(1),
                  dim = input.size(2);
    const auto parts = Apply(qkv, n1(input))
                           .view({batch, length, 3, heads, dim / heads})
                           .permute({2, 0, 3, 1, 4})
                           .unbind(0);
    const at::Tensor mixed =
        at::scaled_dot_product_attention(parts[0], parts[1], parts[2],
                                         /*attn_mask=*/{}, /*dropout_p=*/0.0,
                                         /*is_causal=*/true)
            .transpose(1, 2)
            .reshape({batch, length, dim});
    const at::Tensor x = input + Apply(o, mixed);
    return x + Apply(f2, at::gelu(Apply(f1, n2(x))));
  }

  // Computes what Python's nn.Linear does. libtorch's C++ Linear adds the bias
  // of a batch of sequences to the product in a pass of its own, and rounds
  // twice.
  static at::Tensor Apply(const torch::nn::Linear& linear,
                          const at::Tensor& input) {
    return at::linear(input, linear->weight, linear->bias);
  }

  static torch::nn::LayerNorm Norm(int64_t dim) {
    return torch::nn::LayerNorm(torch::nn::LayerNormOptions({dim}));
  }
  const int64_t heads;
  torch::nn::LayerNorm n1;
  torch::nn::Linear qkv, o;
  torch::nn::LayerNorm n2;
  torch::nn::Linear f1, f2;
};

struct PeerGpt : torch::nn::Module {
  explicit PeerGpt(const PeerGptOptions& options)
      : te(register_module(
            "te",
            torch::nn::Embedding(PeerGptOptions::kVocabulary, options.dim))),
        pe(register_module("pe",
                           torch::nn::Embedding(options.seq, options.dim))) {
    for (int64_t i = 0; i < options.layers; ++i) {
      b->push_back(std::make_shared<PeerBlock>(options.dim, options.heads));
    }
    register_module("b", b);
    n = register_module("n", PeerBlock::Norm(options.dim));
    head = register_module(
        "head", torch::nn::Linear(torch::nn::LinearOptions(
                                      options.dim, PeerGptOptions::kVocabulary)
                                      .bias(false)));
  }

  // Takes inputs and targets of [batch, length], int64. Returns a float32
  // scalar.
  at::Tensor Loss(const at::Tensor& inputs, const at::Tensor& targets) {
    at::Tensor h = te(inputs) + pe->weight.slice(0, 0, inputs.size(1));
    for (const auto& block : *b) h = block->as<PeerBlock>()->forward(h);
    return torch::nn::functional::cross_entropy(
        head(n(h)).flatten(0, 1).to(at::kFloat), targets.flatten());
  }

  torch::nn::Embedding te, pe;
  torch::nn::ModuleList b;
  torch::nn::LayerNorm n{nullptr};
  torch::nn::Linear head{nullptr};
};

}  // namespace tessera
#endif  // BENCHMARKS_GPT_PEER_GPT_H_
