#include "examples/llama/llama.h"

#include <cmath>
#include <memory>

#include "ATen/Functions.h"
#include "absl/strings/match.h"
#include "c10/core/InferenceMode.h"
#include "c10/core/impl/LocalDispatchKeySet.h"
#include "c10/util/Exception.h"
#include "torch/nn/functional/loss.h"
#include "torch/nn/init.h"

namespace {

namespace nn = torch::nn;

nn::Linear MakeLinear(int64_t in, int64_t out, bool bias = false) {
  return nn::Linear(nn::LinearOptions(in, out).bias(bias));
}

// Computes linear(input) as Python's nn.Linear does. In C++ its forward adds
// the bias, if there is one, to a batch of sequences in a pass of its own.
at::Tensor Apply(const nn::Linear& linear, const at::Tensor& input) {
  return at::linear(input, linear->weight, linear->bias);
}

// Adds a module that only serves for its name.
std::shared_ptr<nn::Module> AddModule(nn::Module* parent, const char* name) {
  return parent->register_module(name, std::make_shared<nn::Module>());
}

// Returns how far each pair of numbers rotates from one position to the next,
// in radians [head_dim / 2], if it would rotate by `turns` without scaling.
at::Tensor Scaled(const at::Tensor& turns, const RopeOptions& rope) {
  switch (rope.scaling()) {
    case RopeScaling::kNone:
      return turns;
    case RopeScaling::kLinear:
      return turns / rope.factor();
    case RopeScaling::kLlama3: {
      const auto rounds =  // in all positions that the model was made for
          static_cast<double>(rope.original_positions()) / (2 * M_PI / turns);
      const auto share =
          ((rounds - rope.low_frequency_factor()) /
           (rope.high_frequency_factor() - rope.low_frequency_factor()))
              .clamp(0, 1);
      return (1 - share) * turns / rope.factor() + share * turns;
    }
  }
  return turns;
}

// Numbers i and i + head_dim / 2 of a head rotate together.
RotaryEmbedding MakeRotary(int64_t length, int64_t head_dim,
                           const RopeOptions& rope, const at::Tensor& like) {
  const auto options = at::TensorOptions(at::kFloat).device(like.device());
  const auto turns = Scaled(
      at::pow(rope.theta(), at::arange(0, head_dim, 2, options) / head_dim)
          .reciprocal(),
      rope);
  const auto half = at::outer(at::arange(length, options), turns);
  const auto angles = at::cat({half, half}, -1);
  return {angles.cos().to(like.dtype()), angles.sin().to(like.dtype())};
}

// Rotates `x` [B, heads, T, head_dim].
at::Tensor Turn(const at::Tensor& x, const RotaryEmbedding& rotary) {
  const auto halves = x.chunk(2, -1);
  return x * rotary.cos + at::cat({-halves[1], halves[0]}, -1) * rotary.sin;
}

}  // namespace

bool RotaryEmbedding::Fits(int64_t length, const at::Tensor& like) const {
  return cos.defined() && cos.size(0) == length &&
         cos.device() == like.device() && cos.dtype() == like.dtype();
}

RmsNormImpl::RmsNormImpl(int64_t dim, double eps) : eps_(eps) {
  weight_ = register_parameter("weight", at::ones({dim}));
}

at::Tensor RmsNormImpl::forward(const at::Tensor& input) {
  return at::rms_norm(input, weight_.sizes(), weight_, eps_);
}

LlamaLayerImpl::LlamaLayerImpl(const LlamaOptions& options)
    : options_(options) {
  const int64_t dim = options.dim(), hidden = options.hidden();
  const int64_t q_dim = options.width_of_head() * options.heads();
  const int64_t kv_dim = options.width_of_head() * options.kv_heads();
  const bool bias = options.attention_bias(), mlp_bias = options.mlp_bias();
  const auto attention = AddModule(this, "self_attn");
  q_proj_ = attention->register_module("q_proj", MakeLinear(dim, q_dim, bias));
  k_proj_ = attention->register_module("k_proj", MakeLinear(dim, kv_dim, bias));
  v_proj_ = attention->register_module("v_proj", MakeLinear(dim, kv_dim, bias));
  o_proj_ = attention->register_module("o_proj", MakeLinear(q_dim, dim, bias));
  const auto mlp = AddModule(this, "mlp");
  gate_proj_ =
      mlp->register_module("gate_proj", MakeLinear(dim, hidden, mlp_bias));
  up_proj_ = mlp->register_module("up_proj", MakeLinear(dim, hidden, mlp_bias));
  down_proj_ =
      mlp->register_module("down_proj", MakeLinear(hidden, dim, mlp_bias));
  const double eps = options.norm_eps();
  input_layernorm_ = register_module("input_layernorm", RmsNorm(dim, eps));
  post_attention_layernorm_ =
      register_module("post_attention_layernorm", RmsNorm(dim, eps));
}

at::Tensor LlamaLayerImpl::Attend(const at::Tensor& input,
                                  const RotaryEmbedding& rotary) {
  const auto heads_of = [&](nn::Linear& projection) {
    return Apply(projection, input)
        .unflatten(-1, {-1, options_.width_of_head()})
        .transpose(1, 2);
  };
  const auto mixed = at::scaled_dot_product_attention(
      Turn(heads_of(q_proj_), rotary), Turn(heads_of(k_proj_), rotary),
      heads_of(v_proj_), /*attn_mask=*/{}, /*dropout_p=*/0.0,
      /*is_causal=*/true, /*scale=*/{}, /*enable_gqa=*/true);
  return Apply(o_proj_, mixed.transpose(1, 2).flatten(2));
}

at::Tensor LlamaLayerImpl::forward(const at::Tensor& input,
                                   const RotaryEmbedding& rotary) {
  const auto x = input + Attend(input_layernorm_->forward(input), rotary);
  const auto normed = post_attention_layernorm_->forward(x);
  return x + Apply(down_proj_, at::silu(Apply(gate_proj_, normed)) *
                                   Apply(up_proj_, normed));
}

LlamaImpl::LlamaImpl(const LlamaOptions& options) : options_(options) {
  const int64_t dim = options.dim(), heads = options.heads();
  const int64_t kv_heads = options.kv_heads();
  TORCH_CHECK(heads > 0 && (options.head_dim() > 0 || dim % heads == 0),
              "Llama: dim ", dim, " is not a multiple of heads ", heads,
              ", and there is no head_dim");
  TORCH_CHECK(options.width_of_head() % 2 == 0, "Llama: a head of ",
              options.width_of_head(), " numbers; their number must be even");
  TORCH_CHECK(kv_heads > 0 && heads % kv_heads == 0, "Llama: heads ", heads,
              " is not a multiple of kv_heads ", kv_heads);
  const auto model = AddModule(this, "model");
  embed_tokens_ = model->register_module("embed_tokens",
                                         nn::Embedding(options.vocab(), dim));
  layers_ = model->register_module("layers", nn::ModuleList());
  for (int64_t i = 0; i < options.layers(); ++i) {
    layers_->push_back(LlamaLayer(options));
  }
  norm_ = model->register_module("norm", RmsNorm(dim, options.norm_eps()));
  if (!options.tied()) {
    lm_head_ = register_module("lm_head", MakeLinear(dim, options.vocab()));
  }
  for (const auto& item : named_parameters()) {  // norms keep their ones
    const at::Tensor& parameter = item.value();
    if (parameter.dim() > 1) {
      nn::init::normal_(parameter, 0.0, 0.02);
    } else if (absl::EndsWith(item.key(), ".bias")) {
      nn::init::zeros_(parameter);
    }
  }
}

// Tables that are made in an evaluation serve a training, too. Those of a
// forward that is only traced, as for a plan, may have no values.
RotaryEmbedding LlamaImpl::Rotary(int64_t length, const at::Tensor& like) {
  if (rotary_.Fits(length, like)) return rotary_;
  const c10::InferenceMode no_inference(false);
  RotaryEmbedding made =
      MakeRotary(length, options_.width_of_head(), options_.rope(), like);
  if (!c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Fake)) {
    rotary_ = made;
  }
  return made;
}

at::Tensor LlamaImpl::forward(const at::Tensor& tokens) {
  auto x = embed_tokens_->forward(tokens);
  const RotaryEmbedding rotary = Rotary(tokens.size(1), x);
  for (const auto& layer : *layers_) {
    x = layer->as<LlamaLayer>()->forward(x, rotary);
  }
  x = norm_->forward(x);
  return lm_head_.is_empty() ? at::linear(x, embed_tokens_->weight)
                             : lm_head_->forward(x);
}

at::Tensor LlamaImpl::loss(const at::Tensor& tokens,
                           const at::Tensor& targets) {
  return nn::functional::cross_entropy(
      forward(tokens).flatten(0, 1).to(at::kFloat), targets.flatten());
}
