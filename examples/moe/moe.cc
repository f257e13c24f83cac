#include "examples/moe/moe.h"

#include <algorithm>
#include <string>

#include "ATen/Functions.h"
#include "c10/core/impl/LocalDispatchKeySet.h"
#include "c10/util/Exception.h"
#include "torch/nn/functional/linear.h"
#include "torch/nn/functional/loss.h"
#include "torch/nn/init.h"

namespace {

namespace nn = torch::nn;

constexpr int64_t kChosen = 2;  // experts that each token uses

nn::Linear MakeLinear(int64_t in, int64_t out) {
  return nn::Linear(nn::LinearOptions(in, out).bias(false));
}

// Computes the router's product in float32, where autocast would choose 16
// bits.
at::Tensor Float32Linear(const at::Tensor& input, const at::Tensor& weight) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  return nn::functional::linear(input.to(at::kFloat), weight.to(at::kFloat));
}

nn::LayerNorm MakeNorm(int64_t dim) {
  return nn::LayerNorm(nn::LayerNormOptions({dim}));
}

}  // namespace

MoeExpertImpl::MoeExpertImpl(int64_t dim, int64_t hidden) {
  up_ = register_module("up", MakeLinear(dim, hidden));
  down_ = register_module("down", MakeLinear(hidden, dim));
}

at::Tensor MoeExpertImpl::forward(const at::Tensor& input) {
  return down_->forward(at::gelu(up_->forward(input)));
}

MoeLayerImpl::MoeLayerImpl(const MoeOptions& options) : options_(options) {
  TORCH_CHECK(options.experts() >= kChosen, "Moe: ", options.experts(),
              " experts, but each token takes ", kChosen);
  router_ =
      register_module("router", MakeLinear(options.dim(), options.experts()));
  experts_ = register_module("experts", nn::ModuleList());
  for (int64_t i = 0; i < options.experts(); ++i) {
    experts_->push_back(MoeExpert(options.dim(), options.hidden()));
  }
}

at::Tensor MoeLayerImpl::forward(const at::Tensor& input) {
  const int64_t experts = options_.experts();
  const at::Tensor probabilities =
      at::softmax(Float32Linear(input, router_->weight), -1);
  auto [weights, chosen] = at::topk(probabilities, kChosen, -1);
  weights = weights / weights.sum(-1, /*keepdim=*/true);

  at::Tensor output = at::zeros_like(input);
  choices_.assign(experts, 0);
  for (int64_t i = 0; i < experts; ++i) {
    const at::Tensor at_expert = (chosen == i).nonzero();  // [n, 2]
    choices_[i] = at_expert.size(0);
    if (choices_[i] == 0) continue;  // its parameters get no gradient
    const at::Tensor rows = at_expert.select(1, 0);
    const at::Tensor share = weights.index({rows, at_expert.select(1, 1)});
    const at::Tensor weighted =
        experts_[i]->as<MoeExpert>()->forward(input.index_select(0, rows)) *
        share.unsqueeze(-1);
    output = output.index_add(0, rows, weighted.to(output.scalar_type()));
  }
  const at::Tensor shares =
      at::tensor(choices_, input.options().dtype(at::kFloat)) /
      static_cast<double>(chosen.numel());
  balance_loss_ =
      static_cast<double>(experts) * (shares * probabilities.mean(0)).sum();
  return output;
}

MoeBlockImpl::MoeBlockImpl(const MoeOptions& options) : options_(options) {
  const int64_t dim = options.dim();
  norm1_ = register_module("norm1", MakeNorm(dim));
  qkv_ = register_module("qkv", MakeLinear(dim, 3 * dim));
  out_ = register_module("out", MakeLinear(dim, dim));
  norm2_ = register_module("norm2", MakeNorm(dim));
  moe_ = register_module("moe", MoeLayer(options));
}

at::Tensor MoeBlockImpl::Attend(const at::Tensor& input) {
  const int64_t heads = options_.heads();
  const auto qkv = qkv_->forward(input)
                       .unflatten(-1, {3, heads, options_.dim() / heads})
                       .permute({2, 0, 3, 1, 4})
                       .unbind(0);
  const auto mixed = at::scaled_dot_product_attention(
      qkv[0], qkv[1], qkv[2], /*attn_mask=*/{}, /*dropout_p=*/0.0,
      /*is_causal=*/true);
  return out_->forward(mixed.transpose(1, 2).flatten(2));
}

at::Tensor MoeBlockImpl::forward(const at::Tensor& input) {
  const auto x = input + Attend(norm1_->forward(input));
  return x + moe_->forward(norm2_->forward(x).flatten(0, 1)).view_as(x);
}

MoeImpl::MoeImpl(const MoeOptions& options) : options_(options) {
  const int64_t dim = options.dim();
  TORCH_CHECK(options.heads() > 0 && dim % options.heads() == 0, "Moe: dim ",
              dim, " is not a multiple of heads ", options.heads());
  token_ = register_module("token", nn::Embedding(options.vocab(), dim));
  position_ = register_module("position", nn::Embedding(options.seq(), dim));
  blocks_ = register_module("blocks", nn::ModuleList());
  for (int64_t i = 0; i < options.layers(); ++i) {
    blocks_->push_back(MoeBlock(options));
  }
  norm_ = register_module("norm", MakeNorm(dim));
  head_ = register_module("head", MakeLinear(dim, options.vocab()));
  for (const auto& parameter : parameters()) {  // norms stay as they are
    if (parameter.dim() > 1) nn::init::normal_(parameter, 0.0, 0.02);
  }
}

at::Tensor MoeImpl::forward(const at::Tensor& tokens) {
  const int64_t length = tokens.size(1);
  TORCH_CHECK(length <= options_.seq(), "Moe: ", length,
              " tokens, but the model was made for at most ", options_.seq());
  auto x = token_->forward(tokens) + position_->weight.slice(0, 0, length);
  for (const auto& block : *blocks_) {
    x = block->as<MoeBlock>()->forward(x);
  }
  return head_->forward(norm_->forward(x));
}

at::Tensor MoeImpl::loss(const at::Tensor& tokens, const at::Tensor& targets) {
  auto loss = nn::functional::cross_entropy(
      forward(tokens).flatten(0, 1).to(at::kFloat), targets.flatten());
  cross_entropy_ = loss.detach();
  balance_ = at::zeros_like(cross_entropy_);
  const auto layers = static_cast<double>(options_.layers());
  const double weight = options_.balance() / layers;
  for (const auto& block : *blocks_) {
    const at::Tensor& of_layer = block->as<MoeBlock>()->moe().balance_loss();
    loss = loss + weight * of_layer;
    balance_.add_(of_layer.detach(), 1 / layers);
  }
  return loss;
}

int64_t MoeImpl::unused_experts() const {
  int64_t count = 0;
  for (const auto& block : *blocks_) {
    const auto& choices = block->as<MoeBlock>()->moe().choices();
    count += std::count(choices.begin(), choices.end(), 0);
  }
  return count;
}
