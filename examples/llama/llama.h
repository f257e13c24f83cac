// Llama is the model of LlamaForCausalLM as a plain torch::nn::Module.
//
//   tokens [B, T] -> embed_tokens -> layers x layer -> norm -> lm_head
//   layer: x += self_attn(input_layernorm(x))
//          x += mlp(post_attention_layernorm(x))
//
// Norms are RmsNorm; the mlp is SwiGLU; queries and keys are rotated by their
// position (rotary embedding, pairing the first half of a head with the
// second); groups of heads / kv_heads queries share a key and a value.
//
// Modules are named and nested as in Hugging Face's transformers, so that
// parameters have the same names there, and each reads the other's files
// without a NameMap. llama_config.h reads and writes their config.json.
//
// Sources: Llama (Touvron et al., 2023); RMSNorm (Zhang and Sennrich, 2019);
// SwiGLU (Shazeer, 2020); RoPE (Su et al., 2021); GQA (Ainslie et al., 2023);
// scaling of RoPE: Chen et al., 2023 (linear), Llama 3.1's (llama3).
#ifndef EXAMPLES_LLAMA_LLAMA_H_
#define EXAMPLES_LLAMA_LLAMA_H_

#include <cstdint>

#include "ATen/core/Tensor.h"
#include "torch/arg.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/pimpl.h"

// RopeScaling says how rotary embeddings reach positions that a model was not
// trained for; in LlamaConfig rope_scaling, or rope_parameters.
enum class RopeScaling {
  kNone,    // "default"
  kLinear,  // positions are divided by factor
  // Number pairs that rotate once in more than original_positions /
  // low_frequency_factor positions are slowed down by factor, those that do so
  // in less than original_positions / high_frequency_factor are not, and those
  // in between interpolate the two.
  kLlama3,
};
struct RopeOptions {
  TORCH_ARG(double, theta) = 10000;
  TORCH_ARG(RopeScaling, scaling) = RopeScaling::kNone;
  TORCH_ARG(double, factor) = 1;
  TORCH_ARG(double, low_frequency_factor) = 1;
  TORCH_ARG(double, high_frequency_factor) = 4;
  TORCH_ARG(int64_t, original_positions) = 8192;
};

// Comments name the key in LlamaConfig.
struct LlamaOptions {
  TORCH_ARG(int64_t, dim) = 384;      // hidden_size
  TORCH_ARG(int64_t, layers) = 6;     // num_hidden_layers
  TORCH_ARG(int64_t, heads) = 6;      // num_attention_heads
  TORCH_ARG(int64_t, kv_heads) = 2;   // num_key_value_heads; divides heads
  TORCH_ARG(int64_t, hidden) = 1024;  // intermediate_size, the width of the mlp
  TORCH_ARG(int64_t, vocab) = 256;    // vocab_size
  // head_dim, even; 0: dim / heads, which must be a whole number then.
  TORCH_ARG(int64_t, head_dim) = 0;
  TORCH_ARG(RopeOptions, rope);        // rope_theta and rope_scaling
  TORCH_ARG(double, norm_eps) = 1e-5;  // rms_norm_eps
  TORCH_ARG(bool, tied) = false;       // tie_word_embeddings
  TORCH_ARG(bool, attention_bias) = false;
  TORCH_ARG(bool, mlp_bias) = false;
  // max_position_embeddings; nothing of that size is allocated: a longer text
  // is only one that the model was not trained for.
  TORCH_ARG(int64_t, positions) = 2048;

 public:
  int64_t width_of_head() const {
    return head_dim() > 0 ? head_dim() : dim() / heads();
  }
};

// RmsNorm computes x / sqrt(mean of x^2 + eps) * weight, over the last dim.
class RmsNormImpl : public torch::nn::Module {
 public:
  RmsNormImpl(int64_t dim, double eps);
  at::Tensor forward(const at::Tensor& input);

 private:
  double eps_;
  at::Tensor weight_;
};
TORCH_MODULE(RmsNorm);

// Values for positions 0 to T - 1; each [T, head_dim].
struct RotaryEmbedding {
  at::Tensor cos, sin;

  // Whether these are the values for `length` positions of a model that
  // computes as `like`.
  bool Fits(int64_t length, const at::Tensor& like) const;
};

class LlamaLayerImpl : public torch::nn::Module {
 public:
  explicit LlamaLayerImpl(const LlamaOptions& options);
  // Maps [B, T, dim] to [B, T, dim].
  at::Tensor forward(const at::Tensor& input, const RotaryEmbedding& rotary);

 private:
  at::Tensor Attend(const at::Tensor& input, const RotaryEmbedding& rotary);

  LlamaOptions options_;
  RmsNorm input_layernorm_{nullptr}, post_attention_layernorm_{nullptr};
  torch::nn::Linear q_proj_{nullptr}, k_proj_{nullptr}, v_proj_{nullptr};
  torch::nn::Linear o_proj_{nullptr};
  torch::nn::Linear gate_proj_{nullptr}, up_proj_{nullptr}, down_proj_{nullptr};
};
TORCH_MODULE(LlamaLayer);

class LlamaImpl : public torch::nn::Module {
 public:
  // Draws the initial values from torch's default generator: the same seed
  // gives the same model. Throws if the sizes do not fit each other.
  explicit LlamaImpl(const LlamaOptions& options = LlamaOptions());

  // Takes `tokens` [B, T] of int64; returns the logits, [B, T, vocab].
  at::Tensor forward(const at::Tensor& tokens);

  // Returns the mean cross entropy, in nats per token, of predicting targets
  // [B, T]. It is float32 whatever the logits are, since 16 bits would round it
  // and its gradient.
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets);

  const LlamaOptions& options() const { return options_; }

 private:
  RotaryEmbedding Rotary(int64_t length, const at::Tensor& like);

  LlamaOptions options_;
  // The tables of the last forward, which mostly are those of the next. They
  // are no buffers, since files of Hugging Face's have none of that name.
  RotaryEmbedding rotary_;
  torch::nn::Embedding embed_tokens_{nullptr};
  torch::nn::ModuleList layers_{nullptr};
  RmsNorm norm_{nullptr};
  torch::nn::Linear lm_head_{nullptr};  // none if tied
};
TORCH_MODULE(Llama);

#endif  // EXAMPLES_LLAMA_LLAMA_H_
