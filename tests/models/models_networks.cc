// Test models: whole networks.
#include <torch/torch.h>

#include "tests/models/models_internal.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using at::Tensor;

// ---- Mlp

struct MlpBlockImpl : nn::Module {
  MlpBlockImpl(int64_t dim, int64_t hidden)
      : norm(register_module("norm",
                             nn::LayerNorm(nn::LayerNormOptions({dim})))),
        up(register_module("up", nn::Linear(dim, hidden))),
        down(register_module("down", nn::Linear(hidden, dim))) {}
  Tensor forward(const Tensor& x) {
    return x + down(torch::gelu(In(up, In(norm, x))));
  }
  nn::LayerNorm norm;
  nn::Linear up, down;
};
TORCH_MODULE(MlpBlock);

class Mlp : public TestModel {
 public:
  Mlp() {
    in_ = register_module("in", nn::Linear(11, kDim));
    for (int i = 0; i < 3; ++i) {
      blocks_->push_back(MlpBlock(kDim, 29));
    }
    register_module("blocks", blocks_);
    unused_ = register_module("unused", nn::Linear(7, 5));
    out_ = register_module("out", nn::Linear(kDim, 5));
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(*this, rank, micro_batch);
    Tensor h = in_(inputs.Normal({6, 11}));
    for (const auto& block : *blocks_) h = block->as<MlpBlock>()->forward(h);
    return MseLoss(out_(h), inputs.Target({6, 5}));
  }

 private:
  static constexpr int64_t kDim = 13;
  nn::Linear in_{nullptr}, unused_{nullptr}, out_{nullptr};
  nn::ModuleList blocks_;
};

// ---- Gpt

struct GptBlockImpl : nn::Module {
  GptBlockImpl(int64_t dim, int64_t heads) : heads(heads) {
    norm1 =
        register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({dim})));
    qkv = register_module("qkv", nn::Linear(dim, 3 * dim));
    proj = register_module("proj", nn::Linear(dim, dim));
    norm2 =
        register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({dim})));
    up = register_module("up", nn::Linear(dim, 4 * dim));
    down = register_module("down", nn::Linear(4 * dim, dim));
  }
  Tensor forward(Tensor x) {
    const int64_t b = x.size(0), t = x.size(1), c = x.size(2);
    auto parts = In(qkv, In(norm1, x)).chunk(3, -1);
    for (Tensor& part : parts) {
      part = part.view({b, t, heads, c / heads}).transpose(1, 2);
    }
    Tensor y = at::scaled_dot_product_attention(
        parts[0], parts[1], parts[2], /*attn_mask=*/{}, /*dropout_p=*/0.0,
        /*is_causal=*/true);
    y = proj(y.transpose(1, 2).reshape({b, t, c}));
    x = x + torch::dropout(y, 0.1, is_training());
    return x + down(torch::gelu(In(up, In(norm2, x))));
  }
  int64_t heads;
  nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  nn::Linear qkv{nullptr}, proj{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(GptBlock);

class Gpt : public TestModel {
 public:
  Gpt() {
    tokens_ = register_module("tokens", nn::Embedding(kWords, kDim));
    places_ = register_parameter("places", 0.02 * torch::randn({kSeq, kDim}));
    for (int i = 0; i < 2; ++i) blocks_->push_back(GptBlock(kDim, 2));
    register_module("blocks", blocks_);
    norm_ =
        register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kDim})));
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(*this, rank, micro_batch);
    Tensor h = tokens_(inputs.Tokens(kWords, {3, kSeq})) + places_;
    for (const auto& block : *blocks_) h = block->as<GptBlock>()->forward(h);
    Tensor logits =
        torch::matmul(In(norm_, h).to(h.dtype()), tokens_->weight.t());
    return CrossEntropy(logits.flatten(0, 1),
                        inputs.Tokens(kWords, {3 * kSeq}));
  }

 private:
  static constexpr int64_t kWords = 29, kDim = 14, kSeq = 9;
  nn::Embedding tokens_{nullptr};
  Tensor places_;
  nn::ModuleList blocks_;
  nn::LayerNorm norm_{nullptr};
};

// ---- Torch's own larger modules

class Lstm : public TestModel {
 public:
  Lstm() {
    lstm_ = register_module(
        "lstm",
        nn::LSTM(
            nn::LSTMOptions(5, 7).num_layers(2).bidirectional(true).dropout(
                0.2)));
    head_ = register_module("head", nn::Linear(14, 3));
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(*this, rank, micro_batch);
    Tensor h = std::get<0>(lstm_(inputs.Normal({6, 4, 5})));
    return MseLoss(head_(h), inputs.Target({6, 4, 3}));
  }

 private:
  nn::LSTM lstm_{nullptr};
  nn::Linear head_{nullptr};
};

class Attention : public TestModel {
 public:
  Attention() {
    attention_ = register_module(
        "attention", nn::MultiheadAttention(
                         nn::MultiheadAttentionOptions(kDim, 3).dropout(0.1)));
    for (int i = 0; i < 2; ++i) {
      layers_->push_back(nn::TransformerEncoderLayer(
          nn::TransformerEncoderLayerOptions(kDim, 3)
              .dim_feedforward(17)
              .dropout(0.1)));
    }
    register_module("layers", layers_);
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(*this, rank, micro_batch);
    Tensor x = inputs.Normal({5, 2, kDim});
    Tensor h = x + std::get<0>(attention_(x, x, x));
    for (const auto& layer : *layers_) {
      h = layer->as<nn::TransformerEncoderLayer>()->forward(h);
    }
    return MseLoss(h, inputs.Target({5, 2, kDim}));
  }

 private:
  static constexpr int64_t kDim = 15;
  nn::MultiheadAttention attention_{nullptr};
  nn::ModuleList layers_;
};

class ConvNorm : public TestModel {
 public:
  ConvNorm() {
    conv1_ = register_module("conv1", nn::Conv2d(nn::Conv2dOptions(3, 6, 3)));
    norm1_ = register_module("norm1", nn::BatchNorm2d(6));
    weight2_ = register_parameter(
        "weight2", (0.2 * torch::randn({9, 6, 3, 3}))
                       .contiguous(at::MemoryFormat::ChannelsLast));
    norm2_ =
        register_module("norm2", nn::GroupNorm(nn::GroupNormOptions(3, 9)));
    head_ = register_module("head", nn::Linear(9, 4));
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(*this, rank, micro_batch);
    Tensor h = torch::relu(In(norm1_, conv1_(inputs.Normal({5, 3, 8, 8}))));
    h = torch::conv2d(h.to(weight2_.dtype()), weight2_);
    h = torch::relu(In(norm2_, h));
    return CrossEntropy(In(head_, h.mean({2, 3})), inputs.Tokens(4, {5}));
  }

 private:
  nn::Conv2d conv1_{nullptr};
  nn::BatchNorm2d norm1_{nullptr};
  Tensor weight2_;
  nn::GroupNorm norm2_{nullptr};
  nn::Linear head_{nullptr};
};

}  // namespace

ModelMakers NetworkModels() {
  return {
      {"Mlp", MakeModel<Mlp>},           {"Gpt", MakeModel<Gpt>},
      {"Lstm", MakeModel<Lstm>},         {"Attention", MakeModel<Attention>},
      {"ConvNorm", MakeModel<ConvNorm>},
  };
}

}  // namespace tessera
