#include "parallel/plan/planned_models_test_util.h"

#include <torch/torch.h>

#include <string>

namespace tessera {
namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using at::Tensor;

Tensor Rotated(const Tensor& x) {
  const int64_t length = x.size(-2), half = x.size(-1) / 2;
  const Tensor angles =
      torch::arange(length, x.options()).unsqueeze(1) *
      torch::arange(1, half + 1, x.options()).reciprocal().unsqueeze(0);
  const Tensor cos = at::cat({angles.cos(), angles.cos()}, 1);
  const Tensor sin = at::cat({angles.sin(), angles.sin()}, 1);
  const std::vector<Tensor> halves = x.chunk(2, -1);
  return x * cos + at::cat({-halves[1], halves[0]}, -1) * sin;
}

// [batch, key heads, length, dims] -> [batch, heads, length, dims].
Tensor Repeated(const Tensor& x, int64_t heads) {
  const int64_t times = heads / x.size(1);
  if (times == 1) return x;
  return x.unsqueeze(2)
      .expand({x.size(0), x.size(1), times, x.size(2), x.size(3)})
      .reshape({x.size(0), heads, x.size(2), x.size(3)});
}

}  // namespace

PlannedNormImpl::PlannedNormImpl(int64_t dim, bool rms) {
  weight = register_parameter("weight", torch::ones({dim}));
  if (!rms) bias = register_parameter("bias", torch::zeros({dim}));
}

Tensor PlannedNormImpl::forward(const Tensor& x) {
  if (bias.defined()) return at::layer_norm(x, {x.size(-1)}, weight, bias);
  return x * (x.square().mean({-1}, true) + 1e-5).rsqrt() * weight;
}

PlannedBlockImpl::PlannedBlockImpl(const PlannedNetOptions& options)
    : options(options) {
  const int64_t dim = options.dim;
  const auto add = [&](const std::string& name, int64_t in, int64_t out) {
    return register_module(
        name, nn::Linear(nn::LinearOptions(in, out).bias(!options.llama)));
  };
  n1 = register_module("n1", PlannedNorm(dim, options.llama));
  if (options.fused) {
    qkv = add("qkv", dim, 3 * dim);
  } else {
    const int64_t keys = dim / options.heads * options.key_heads;
    q = add("q", dim, dim);
    k = add("k", dim, keys);
    v = add("v", dim, keys);
  }
  o = add("o", dim, dim);
  n2 = register_module("n2", PlannedNorm(dim, options.llama));
  if (options.llama) gate = add("gate", dim, 4 * dim);
  up = add("up", dim, 4 * dim);
  down = add("down", 4 * dim, dim);
}

std::vector<Tensor> PlannedBlockImpl::Heads(const Tensor& x) {
  const int64_t dims = options.dim / options.heads;
  if (options.fused) {
    return qkv(x)
        .view({x.size(0), x.size(1), 3, options.heads, dims})
        .permute({2, 0, 3, 1, 4})
        .unbind(0);
  }
  std::vector<Tensor> all;
  for (nn::Linear* const each : {&q, &k, &v}) {
    all.push_back(
        (*each)(x).view({x.size(0), x.size(1), -1, dims}).transpose(1, 2));
  }
  if (options.llama) {
    all[0] = Rotated(all[0]);
    all[1] = Rotated(all[1]);
  }
  all[1] = Repeated(all[1], options.heads);
  all[2] = Repeated(all[2], options.heads);
  return all;
}

Tensor PlannedBlockImpl::forward(const Tensor& x) {
  const std::vector<Tensor> heads = Heads(n1(x));
  const Tensor mixed = at::scaled_dot_product_attention(
      heads[0], heads[1], heads[2], {}, 0., /*is_causal=*/true);
  const Tensor y = x + o(mixed.transpose(1, 2).reshape(x.sizes()));
  const Tensor z = n2(y);
  return y + down(options.llama ? at::silu(gate(z)) * up(z) : F::gelu(up(z)));
}

PlannedNetImpl::PlannedNetImpl(const PlannedNetOptions& options)
    : options(options) {
  words = register_module("words", nn::Embedding(options.words, options.dim));
  nn::ModuleList layers;
  for (int64_t i = 0; i < options.layers; ++i) {
    blocks.emplace_back(options);
    layers->push_back(blocks.back());
  }
  register_module("layers", layers);
  norm = register_module("norm", PlannedNorm(options.dim, options.llama));
  if (options.tied) return;
  head = register_module(
      "head",
      nn::Linear(nn::LinearOptions(options.dim, options.words).bias(false)));
}

Tensor PlannedNetImpl::Loss(const Tensor& tokens) {
  Tensor x = words(tokens);
  for (PlannedBlock& each : blocks) x = each(x);
  x = norm(x);
  const Tensor logits =
      F::linear(x, options.tied ? words->weight : head->weight);
  const Tensor next = (tokens * 7 + 3).remainder(options.words);
  return F::cross_entropy(logits.flatten(0, 1), next.flatten());
}

PlannedExpertImpl::PlannedExpertImpl(int64_t dim)
    : up(register_module("up", nn::Linear(dim, 4 * dim))),
      down(register_module("down", nn::Linear(4 * dim, dim))) {}

PlannedMixtureImpl::PlannedMixtureImpl(int64_t dim)
    : router(register_module("router", nn::Linear(dim, 4))) {
  nn::ModuleList list;
  for (int i = 0; i < 4; ++i) {
    experts.emplace_back(dim);
    list->push_back(experts.back());
  }
  register_module("experts", list);
}

Tensor PlannedMixtureImpl::Loss(const Tensor& x) {
  const Tensor weights = at::softmax(router(x), -1);
  Tensor y = x;
  for (int64_t i = 0; i < 4; ++i) {
    PlannedExpert& each = experts[static_cast<size_t>(i)];
    y = y +
        each->down(at::silu(each->up(x))) * weights.select(-1, i).unsqueeze(-1);
  }
  return y.square().mean();
}

}  // namespace tessera
