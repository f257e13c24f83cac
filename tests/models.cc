#include "tests/models.h"

#include <torch/torch.h>

#include <functional>
#include <map>
#include <utility>

namespace tessera {
namespace {

namespace nn = torch::nn;
using at::Tensor;

// Random inputs of one micro-batch of one rank.
class Inputs {
 public:
  Inputs(int rank, int64_t micro_batch)
      : generator_(at::detail::createCPUGenerator(
            1000003 * static_cast<uint64_t>(micro_batch) +
            static_cast<uint64_t>(rank) + 17)) {}

  Tensor Normal(at::IntArrayRef sizes) {
    return torch::randn(sizes, generator_);
  }
  Tensor Tokens(int64_t below, at::IntArrayRef sizes) {
    return torch::randint(below, sizes, generator_, torch::kLong);
  }

 private:
  at::Generator generator_;
};

// ---- Mlp

struct MlpBlockImpl : nn::Module {
  MlpBlockImpl(int64_t dim, int64_t hidden)
      : norm(register_module("norm",
                             nn::LayerNorm(nn::LayerNormOptions({dim})))),
        up(register_module("up", nn::Linear(dim, hidden))),
        down(register_module("down", nn::Linear(hidden, dim))) {}
  Tensor forward(const Tensor& x) { return x + down(torch::gelu(up(norm(x)))); }
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
    Inputs inputs(rank, micro_batch);
    Tensor h = in_(inputs.Normal({6, 11}));
    for (const auto& block : *blocks_) h = block->as<MlpBlock>()->forward(h);
    return torch::mse_loss(out_(h), inputs.Normal({6, 5}));
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
    auto parts = qkv(norm1(x)).chunk(3, -1);
    for (Tensor& part : parts) {
      part = part.view({b, t, heads, c / heads}).transpose(1, 2);
    }
    Tensor y = at::scaled_dot_product_attention(
        parts[0], parts[1], parts[2], /*attn_mask=*/{}, /*dropout_p=*/0.0,
        /*is_causal=*/true);
    y = proj(y.transpose(1, 2).reshape({b, t, c}));
    x = x + torch::dropout(y, 0.1, is_training());
    return x + down(torch::gelu(up(norm2(x))));
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
    Inputs inputs(rank, micro_batch);
    Tensor h = tokens_(inputs.Tokens(kWords, {3, kSeq})) + places_;
    for (const auto& block : *blocks_) h = block->as<GptBlock>()->forward(h);
    Tensor logits = torch::matmul(norm_(h), tokens_->weight.t());
    return torch::cross_entropy_loss(logits.flatten(0, 1),
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
    Inputs inputs(rank, micro_batch);
    Tensor h = std::get<0>(lstm_(inputs.Normal({6, 4, 5})));
    return torch::mse_loss(head_(h), inputs.Normal({6, 4, 3}));
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
    Inputs inputs(rank, micro_batch);
    Tensor x = inputs.Normal({5, 2, kDim});
    Tensor h = x + std::get<0>(attention_(x, x, x));
    for (const auto& layer : *layers_) {
      h = layer->as<nn::TransformerEncoderLayer>()->forward(h);
    }
    return torch::mse_loss(h, inputs.Normal({5, 2, kDim}));
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
    Inputs inputs(rank, micro_batch);
    Tensor h = torch::relu(norm1_(conv1_(inputs.Normal({5, 3, 8, 8}))));
    h = torch::relu(norm2_(torch::conv2d(h, weight2_)));
    return torch::cross_entropy_loss(head_(h.mean({2, 3})),
                                     inputs.Tokens(4, {5}));
  }

 private:
  nn::Conv2d conv1_{nullptr};
  nn::BatchNorm2d norm1_{nullptr};
  Tensor weight2_;
  nn::GroupNorm norm2_{nullptr};
  nn::Linear head_{nullptr};
};

// ---- Ways of reaching a parameter

class Views : public TestModel {
 public:
  Views() {
    qkv_ = register_parameter("qkv", 0.3 * torch::randn({3 * kDim, kDim}));
    table_ = register_parameter("table", torch::randn({kDim * 4}));
    scale_ = register_parameter("scale", torch::ones({1}));
    bias_ = register_parameter("bias", torch::randn({kDim, 3}));
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(rank, micro_batch);
    Tensor x = inputs.Normal({4, kDim});
    auto w = qkv_.chunk(3, 0);
    Tensor h = torch::matmul(x, w[0].t()) * torch::linear(x, w[1]);
    h = h + torch::addmm(bias_.select(1, 1), x, w[2].transpose(0, 1));
    h = h + table_.view({4, kDim});
    h = h * table_.slice(0, 3, 3 + kDim) + scale_.expand({4, kDim});
    h = h + table_.index({inputs.Tokens(kDim * 4, {4, kDim})});
    h = h + bias_.unbind(1)[2] * bias_.permute({1, 0}).narrow(0, 0, 1);
    return torch::mse_loss(h, inputs.Normal({4, kDim}));
  }

 private:
  static constexpr int64_t kDim = 11;
  Tensor qkv_, table_, scale_, bias_;
};

class SharedStorage : public TestModel {
 public:
  SharedStorage() {
    Tensor all = torch::randn({600});
    weight_ =
        register_parameter("weight", all.narrow(0, 3, 21 * 13).view({21, 13}));
    bias_ = register_parameter("bias", all.narrow(0, 300, 21));
    head_ =
        register_parameter("head", all.narrow(0, 333, 21 * 9).view({9, 21}));
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(rank, micro_batch);
    Tensor h =
        torch::tanh(torch::linear(inputs.Normal({4, 13}), weight_, bias_));
    return torch::mse_loss(torch::linear(h, head_), inputs.Normal({4, 9}));
  }

 private:
  Tensor weight_, bias_, head_;
};

class UsedTwice : public TestModel {
 public:
  UsedTwice() {
    first_ = register_module("first", nn::Linear(9, 9));
    again_ = register_module("again", nn::Linear(9, 9));
    last_ = register_module("last", nn::Linear(9, 9));
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(rank, micro_batch);
    Tensor h = again_(torch::relu(first_(inputs.Normal({5, 9}))));
    h = again_(torch::tanh(h));
    return torch::mse_loss(last_(h), inputs.Normal({5, 9}));
  }

 private:
  nn::Linear first_{nullptr}, again_{nullptr}, last_{nullptr};
};

class Frozen : public TestModel {
 public:
  explicit Frozen(bool thaw) : thaw_(thaw) {
    table_ = register_module("table", nn::Embedding(17, 10));
    frozen_ = register_module("frozen", nn::Linear(10, 12));
    norm_ = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({12})));
    head_ = register_module("head", nn::Linear(12, 17));
    table_->weight.requires_grad_(false);
    for (Tensor& p : frozen_->parameters()) p.requires_grad_(false);
    norm_->bias.requires_grad_(false);
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    if (thaw_ && micro_batch == 1) frozen_->weight.requires_grad_(true);
    Inputs inputs(rank, micro_batch);
    Tensor x = table_(inputs.Tokens(17, {8})) + inputs.Normal({8, 10});
    Tensor h = norm_(torch::tanh(frozen_(x)));
    return torch::cross_entropy_loss(head_(h), inputs.Tokens(17, {8}));
  }

 private:
  const bool thaw_;
  nn::Embedding table_{nullptr};
  nn::Linear frozen_{nullptr}, head_{nullptr};
  nn::LayerNorm norm_{nullptr};
};

class Embedding : public TestModel {
 public:
  Embedding() {
    table_ = register_module(
        "table", nn::Embedding(nn::EmbeddingOptions(19, 7).padding_idx(0)));
    bag_ = register_module("bag", nn::EmbeddingBag(19, 7));
    head_ = register_module("head", nn::Linear(7, 19));
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(rank, micro_batch);
    // Few words, so that the padding row and repeated rows occur.
    Tensor words = inputs.Tokens(5, {6, 4});
    Tensor h =
        table_(words).mean(1) + bag_(words) + table_(inputs.Tokens(19, {6}));
    return torch::cross_entropy_loss(head_(h), inputs.Tokens(19, {6}));
  }

 private:
  nn::Embedding table_{nullptr};
  nn::EmbeddingBag bag_{nullptr};
  nn::Linear head_{nullptr};
};

// ---- Ranks that differ

class OneRank : public TestModel {
 public:
  OneRank() {
    common_ = register_module("common", nn::Linear(8, 9));
    own_ = register_module("own", nn::Linear(8, 9));
    head_ = register_module("head", nn::Linear(9, 3));
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(rank, micro_batch);
    Tensor x = inputs.Normal({4, 8});
    Tensor h = torch::tanh(common_(x));
    Tensor own = own_(x);
    Tensor loss = torch::mse_loss(head_(h), inputs.Normal({4, 3}));
    return rank == 1 ? loss + own.square().mean() : loss;
  }

 private:
  nn::Linear common_{nullptr}, own_{nullptr}, head_{nullptr};
};

class ChangingRank : public TestModel {
 public:
  ChangingRank() {
    common_ = register_module("common", nn::Linear(8, 9));
    own_ = register_module("own", nn::Linear(8, 9));
    late_ = register_module("late", nn::Linear(8, 9));
    head_ = register_module("head", nn::Linear(9, 3));
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(rank, micro_batch);
    Tensor x = inputs.Normal({4, 8});
    Tensor h = torch::tanh(common_(x));
    Tensor own = own_(x), late = late_(x);
    Tensor loss = torch::mse_loss(head_(h), inputs.Normal({4, 3}));
    if (micro_batch % 4 == rank) loss = loss + own.square().mean();
    if (micro_batch > 1 && rank == 0) loss = loss + late.abs().mean();
    return loss;
  }

 private:
  nn::Linear common_{nullptr}, own_{nullptr}, late_{nullptr}, head_{nullptr};
};

class OneRankForward : public TestModel {
 public:
  OneRankForward() {
    common_ = register_module("common", nn::Linear(8, 9));
    own_ = register_module("own", nn::Linear(9, 9));
    head_ = register_module("head", nn::Linear(9, 3));
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(rank, micro_batch);
    Tensor h = torch::tanh(common_(inputs.Normal({4, 8})));
    if (rank == 1) h = own_(h);
    return torch::mse_loss(head_(h), inputs.Normal({4, 3}));
  }

 private:
  nn::Linear common_{nullptr}, own_{nullptr}, head_{nullptr};
};

// ---- Two dtypes

class MixedDtype : public TestModel {
 public:
  MixedDtype() {
    first_ = register_module("first", nn::Linear(7, 9));
    scale_ = register_parameter("scale", torch::randn({9, 5}, torch::kDouble));
    shift_ = register_parameter("shift", torch::randn({5}, torch::kDouble));
    last_ = register_module("last", nn::Linear(5, 3));
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(rank, micro_batch);
    Tensor h = torch::tanh(first_(inputs.Normal({4, 7})));
    h = torch::addmm(shift_, h.to(torch::kDouble), scale_);
    return torch::mse_loss(last_(h.to(torch::kFloat)), inputs.Normal({4, 3}));
  }

 private:
  nn::Linear first_{nullptr}, last_{nullptr};
  Tensor scale_, shift_;
};

template <typename T>
std::shared_ptr<TestModel> Make() {
  return std::make_shared<T>();
}

const std::map<std::string, std::function<std::shared_ptr<TestModel>()>>&
Makers() {
  static const auto* makers =
      new std::map<std::string, std::function<std::shared_ptr<TestModel>()>>{
          {"Mlp", Make<Mlp>},
          {"Gpt", Make<Gpt>},
          {"Lstm", Make<Lstm>},
          {"Attention", Make<Attention>},
          {"ConvNorm", Make<ConvNorm>},
          {"Views", Make<Views>},
          {"SharedStorage", Make<SharedStorage>},
          {"UsedTwice", Make<UsedTwice>},
          {"Frozen", [] { return std::make_shared<Frozen>(false); }},
          {"Thawed", [] { return std::make_shared<Frozen>(true); }},
          {"Embedding", Make<Embedding>},
          {"OneRank", Make<OneRank>},
          {"ChangingRank", Make<ChangingRank>},
          {"OneRankForward", Make<OneRankForward>},
          {"MixedDtype", Make<MixedDtype>},
      };
  return *makers;
}

}  // namespace

std::shared_ptr<TestModel> MakeTestModel(absl::string_view name) {
  auto maker = Makers().find(std::string(name));
  TORCH_CHECK(maker != Makers().end(), "no test model ", std::string(name));
  return maker->second();
}

std::vector<std::string> TestModelNames() {
  std::vector<std::string> names;
  for (const auto& maker : Makers()) names.push_back(maker.first);
  return names;
}

}  // namespace tessera
