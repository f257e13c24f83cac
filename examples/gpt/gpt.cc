#include "examples/gpt/gpt.h"

#include <cmath>

#include "ATen/Functions.h"
#include "c10/util/Exception.h"
#include "torch/nn/functional/loss.h"
#include "torch/nn/init.h"

namespace {

namespace nn = torch::nn;

nn::LayerNorm MakeNorm(int64_t dim) {
  return nn::LayerNorm(nn::LayerNormOptions({dim}));
}

// Computes linear(input) as Python's nn.Linear does. In C++ its forward adds
// the bias to a batch of sequences in a pass of its own.
at::Tensor Apply(const nn::Linear& linear, const at::Tensor& input) {
  return at::linear(input, linear->weight, linear->bias);
}

// Drops out numbers. Where there is nothing to drop it leaves its input and the
// random numbers alone.
at::Tensor Dropout(const at::Tensor& input, double p, bool training) {
  return p > 0 ? at::dropout(input, p, training) : input;
}

}  // namespace

GptBlockImpl::GptBlockImpl(const GptOptions& options) : options_(options) {
  const int64_t dim = options.dim();
  norm1_ = register_module("norm1", MakeNorm(dim));
  qkv_ = register_module("qkv", nn::Linear(dim, 3 * dim));
  out_ = register_module("out", nn::Linear(dim, dim));
  norm2_ = register_module("norm2", MakeNorm(dim));
  up_ = register_module("up", nn::Linear(dim, 4 * dim));
  down_ = register_module("down", nn::Linear(4 * dim, dim));
}

at::Tensor GptBlockImpl::Attend(const at::Tensor& input) {
  const int64_t batch = input.size(0), length = input.size(1);
  const int64_t dim = options_.dim(), heads = options_.heads();
  auto qkv = Apply(qkv_, input)
                 .view({batch, length, 3, heads, dim / heads})
                 .permute({2, 0, 3, 1, 4})
                 .unbind(0);
  auto mixed = at::scaled_dot_product_attention(
      qkv[0], qkv[1], qkv[2], /*attn_mask=*/{}, /*dropout_p=*/0.0,
      /*is_causal=*/true);
  return Apply(out_, mixed.transpose(1, 2).reshape({batch, length, dim}));
}

at::Tensor GptBlockImpl::forward(const at::Tensor& input) {
  const double p = options_.dropout();
  auto x = input + Dropout(Attend(norm1_->forward(input)), p, is_training());
  auto hidden = at::gelu(Apply(up_, norm2_->forward(x)),
                         options_.gelu_tanh() ? "tanh" : "none");
  return x + Dropout(Apply(down_, hidden), p, is_training());
}

GptImpl::GptImpl(const GptOptions& options) : options_(options) {
  const int64_t dim = options.dim();
  TORCH_CHECK(options.heads() > 0 && dim % options.heads() == 0, "Gpt: dim ",
              dim, " is not a multiple of heads ", options.heads());
  token_ = register_module("token", nn::Embedding(options.vocab(), dim));
  position_ = register_module("position", nn::Embedding(options.seq(), dim));
  blocks_ = register_module("blocks", nn::ModuleList());
  for (int64_t i = 0; i < options.layers(); ++i) {
    blocks_->push_back(GptBlock(options));
  }
  norm_ = register_module("norm", MakeNorm(dim));
  if (!options.tied()) {
    head_ = register_module(
        "head",
        nn::Linear(nn::LinearOptions(dim, options.vocab()).bias(false)));
  }
  InitializeWeights();
}

// Draws weights from a normal distribution with deviation 0.02; biases are
// zero. The outputs that are added to the residual stream are scaled down, so
// that its variance does not grow with depth.
void GptImpl::InitializeWeights() {
  constexpr double kDeviation = 0.02;
  const double residual =
      kDeviation / std::sqrt(2.0 * static_cast<double>(options_.layers()));
  for (const auto& item : named_parameters()) {
    const std::string& name = item.key();
    if (name.find("norm") != std::string::npos) continue;  // ones and zeros
    const bool adds = name.find(".out.") != std::string::npos ||
                      name.find(".down.") != std::string::npos;
    if (item.value().dim() == 1) {
      nn::init::zeros_(item.value());
    } else {
      nn::init::normal_(item.value(), 0.0, adds ? residual : kDeviation);
    }
  }
}

at::Tensor GptImpl::hidden(const at::Tensor& tokens) {
  const int64_t length = tokens.size(1);
  TORCH_CHECK(length <= options_.seq(), "Gpt: ", length,
              " tokens, but the model was made for at most ", options_.seq());
  auto x = token_->forward(tokens) + position_->weight.slice(0, 0, length);
  x = Dropout(x, options_.dropout(), is_training());
  for (const auto& block : *blocks_) {
    x = block->as<GptBlock>()->forward(x);
  }
  return norm_->forward(x);
}

const at::Tensor& GptImpl::head_weight() const {
  return head_.is_empty() ? token_->weight : head_->weight;
}

at::Tensor GptImpl::forward(const at::Tensor& tokens) {
  return at::linear(hidden(tokens), head_weight());
}

at::Tensor GptImpl::loss(const at::Tensor& tokens, const at::Tensor& targets) {
  return nn::functional::cross_entropy(
      forward(tokens).flatten(0, 1).to(at::kFloat), targets.flatten());
}
