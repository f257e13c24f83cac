#include "sharding/trace/traced_models_test_util.h"

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <vector>

#include "absl/strings/str_cat.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using at::Tensor;

template <typename M>
TracedModel Of(std::shared_ptr<M> module) {
  return {module, [module] { return module->Loss(); }};
}

// ---- the models

struct MlpModel : nn::Module {
  MlpModel() {
    layers = register_module(
        "layers",
        nn::Sequential(nn::Linear(256, 512), nn::ReLU(), nn::Linear(512, 512),
                       nn::GELU(), nn::Linear(512, 10)));
  }
  Tensor Loss() {
    return nn::functional::cross_entropy(
        layers->forward(torch::randn({512, 256})),
        torch::randint(10, {512}, torch::kLong));
  }
  nn::Sequential layers{nullptr};
};

struct GptModel : nn::Module {
  static constexpr int64_t kDim = 192, kHeads = 4, kSeq = 160, kWords = 500;
  struct Block : nn::Module {
    Block() {
      norm1 =
          register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({kDim})));
      qkv = register_module("qkv", nn::Linear(kDim, 3 * kDim));
      out = register_module("out", nn::Linear(kDim, kDim));
      norm2 =
          register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({kDim})));
      up = register_module("up", nn::Linear(kDim, 4 * kDim));
      down = register_module("down", nn::Linear(4 * kDim, kDim));
    }
    Tensor forward(const Tensor& input) {
      const int64_t b = input.size(0), t = input.size(1);
      auto parts = qkv(norm1(input))
                       .view({b, t, 3, kHeads, kDim / kHeads})
                       .permute({2, 0, 3, 1, 4})
                       .unbind(0);
      auto mixed = at::scaled_dot_product_attention(
          parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
      auto x = input + out(mixed.transpose(1, 2).reshape({b, t, kDim}));
      return x + down(at::gelu(up(norm2(x))));
    }
    nn::LayerNorm norm1{nullptr}, norm2{nullptr};
    nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
  };
  GptModel() {
    token = register_module("token", nn::Embedding(kWords, kDim));
    position = register_module("position", nn::Embedding(kSeq, kDim));
    for (int i = 0; i < 3; ++i) {
      blocks.push_back(
          register_module(absl::StrCat("block", i), std::make_shared<Block>()));
    }
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kDim})));
    head = register_module("head", nn::Linear(kDim, kWords));
  }
  Tensor Loss() {
    auto tokens = torch::randint(kWords, {batch, kSeq}, torch::kLong);
    auto x = token(tokens) + position->weight.slice(0, 0, kSeq);
    for (auto& block : blocks) x = block->forward(x);
    return nn::functional::cross_entropy(head(norm(x)).flatten(0, 1),
                                         tokens.flatten());
  }
  int64_t batch = 4;
  nn::Embedding token{nullptr}, position{nullptr};
  std::vector<std::shared_ptr<Block>> blocks;
  nn::LayerNorm norm{nullptr};
  nn::Linear head{nullptr};
};

struct LlamaModel : nn::Module {
  static constexpr int64_t kDim = 192, kHeads = 6, kGroups = 2, kHidden = 512,
                           kWords = 700, kSeq = 128;
  struct Layer : nn::Module {
    static nn::Linear Make(int64_t in, int64_t out) {
      return nn::Linear(nn::LinearOptions(in, out).bias(false));
    }
    Layer() {
      const int64_t narrow = kDim / kHeads * kGroups;
      q = register_module("q", Make(kDim, kDim));
      k = register_module("k", Make(kDim, narrow));
      v = register_module("v", Make(kDim, narrow));
      o = register_module("o", Make(kDim, kDim));
      gate = register_module("gate", Make(kDim, kHidden));
      up = register_module("up", Make(kDim, kHidden));
      down = register_module("down", Make(kHidden, kDim));
      norm1 = register_parameter("norm1", torch::ones({kDim}));
      norm2 = register_parameter("norm2", torch::ones({kDim}));
    }
    static Tensor Turn(const Tensor& x, const Tensor& cos, const Tensor& sin) {
      const auto halves = x.chunk(2, -1);
      return x * cos + at::cat({-halves[1], halves[0]}, -1) * sin;
    }
    Tensor forward(const Tensor& input, const Tensor& cos, const Tensor& sin) {
      const Tensor n = at::rms_norm(input, {kDim}, norm1, 1e-5);
      const auto heads = [&](nn::Linear& l) {
        return l(n).unflatten(-1, {-1, kDim / kHeads}).transpose(1, 2);
      };
      const Tensor mixed = at::scaled_dot_product_attention(
          Turn(heads(q), cos, sin), Turn(heads(k), cos, sin), heads(v), {}, 0.0,
          true, {}, /*enable_gqa=*/true);
      const Tensor x = input + o(mixed.transpose(1, 2).flatten(2));
      const Tensor m = at::rms_norm(x, {kDim}, norm2, 1e-5);
      return x + down(at::silu(gate(m)) * up(m));
    }
    nn::Linear q{nullptr}, k{nullptr}, v{nullptr}, o{nullptr}, gate{nullptr},
        up{nullptr}, down{nullptr};
    Tensor norm1, norm2;
  };
  LlamaModel() {
    embed = register_module("embed", nn::Embedding(kWords, kDim));
    for (int i = 0; i < 3; ++i) {
      layers.push_back(
          register_module(absl::StrCat("layer", i), std::make_shared<Layer>()));
    }
    head = register_module("head", Layer::Make(kDim, kWords));
  }
  Tensor Loss() {
    auto tokens = torch::randint(kWords, {3, kSeq}, torch::kLong);
    auto x = embed(tokens);
    const auto turns =
        at::pow(10000.0, at::arange(0, kDim / kHeads, 2) / (kDim / kHeads))
            .reciprocal();
    const auto half = at::outer(at::arange(kSeq, at::kFloat), turns);
    const auto angles = at::cat({half, half}, -1);
    for (auto& layer : layers) {
      x = layer->forward(x, angles.cos(), angles.sin());
    }
    return nn::functional::cross_entropy(head(x).flatten(0, 1),
                                         tokens.flatten());
  }
  nn::Embedding embed{nullptr};
  std::vector<std::shared_ptr<Layer>> layers;
  nn::Linear head{nullptr};
};

struct CnnModel : nn::Module {
  CnnModel() {
    layers = register_module(
        "layers",
        nn::Sequential(
            nn::Conv2d(nn::Conv2dOptions(3, 32, 3).padding(1)),
            nn::BatchNorm2d(32), nn::ReLU(),
            nn::MaxPool2d(nn::MaxPool2dOptions(2)),
            nn::Conv2d(nn::Conv2dOptions(32, 64, 3).padding(1)),
            nn::BatchNorm2d(64), nn::ReLU(),
            nn::Conv2d(nn::Conv2dOptions(64, 64, 3).padding(1).stride(2)),
            nn::BatchNorm2d(64), nn::ReLU(),
            nn::AdaptiveAvgPool2d(nn::AdaptiveAvgPool2dOptions({1, 1})),
            nn::Flatten(), nn::Linear(64, 10)));
  }
  Tensor Loss() {
    return nn::functional::cross_entropy(
        layers->forward(torch::randn({16, 3, 32, 32})),
        torch::randint(10, {16}, torch::kLong));
  }
  nn::Sequential layers{nullptr};
};

// A CnnModel in 16 bits.
struct NarrowCnnModel : CnnModel {
  NarrowCnnModel() { to(torch::kBFloat16); }
  Tensor Loss() {
    return nn::functional::cross_entropy(
        layers->forward(torch::randn({16, 3, 32, 32}).to(torch::kBFloat16)),
        torch::randint(10, {16}, torch::kLong));
  }
};

struct EncoderModel : nn::Module {
  EncoderModel() {
    encoder = register_module(
        "encoder",
        nn::TransformerEncoder(nn::TransformerEncoderOptions(
            nn::TransformerEncoderLayerOptions(128, 4).dim_feedforward(512),
            2)));
    head = register_module("head", nn::Linear(128, 16));
  }
  Tensor Loss() {
    return head(encoder(torch::randn({96, 4, 128}))).square().mean();
  }
  nn::TransformerEncoder encoder{nullptr};
  nn::Linear head{nullptr};
};

struct BagModel : nn::Module {
  BagModel() {
    bag = register_module(
        "bag",
        nn::EmbeddingBag(nn::EmbeddingBagOptions(5000, 64).mode(torch::kSum)));
    layers = register_module(
        "layers",
        nn::Sequential(nn::Linear(64, 256), nn::Tanh(), nn::Linear(256, 1)));
  }
  Tensor Loss() {
    auto words = torch::randint(5000, {256 * 20}, torch::kLong);
    auto offsets = torch::arange(0, 256 * 20, 20, torch::kLong);
    return nn::functional::binary_cross_entropy_with_logits(
        layers->forward(bag(words, offsets)), torch::ones({256, 1}));
  }
  nn::EmbeddingBag bag{nullptr};
  nn::Sequential layers{nullptr};
};

struct VaeModel : nn::Module {
  VaeModel() {
    in = register_module("in", nn::Linear(784, 400));
    mean = register_module("mean", nn::Linear(400, 20));
    spread = register_module("spread", nn::Linear(400, 20));
    back = register_module("back", nn::Linear(20, 400));
    out = register_module("out", nn::Linear(400, 784));
  }
  Tensor Loss() {
    const Tensor x = torch::rand({256, 784});
    const Tensor h = torch::relu(in(x));
    const Tensor m = mean(h), s = spread(h);
    const Tensor z = m + torch::randn_like(m) * torch::exp(0.5 * s);
    const Tensor y = torch::sigmoid(out(torch::relu(back(z))));
    return nn::functional::binary_cross_entropy(
               y, x,
               nn::functional::BinaryCrossEntropyFuncOptions().reduction(
                   torch::kSum)) -
           0.5 * torch::sum(1 + s - m.pow(2) - s.exp());
  }
  nn::Linear in{nullptr}, mean{nullptr}, spread{nullptr}, back{nullptr},
      out{nullptr};
};

// Experts of a fixed capacity, as in GShard: who is not among the first is
// dropped.
struct ExpertsModel : nn::Module {
  static constexpr int64_t kDim = 128, kExperts = 4, kTokens = 512,
                           kCapacity = 160;
  ExpertsModel() {
    router = register_module("router", nn::Linear(kDim, kExperts));
    for (int i = 0; i < kExperts; ++i) {
      experts.push_back(
          register_module(absl::StrCat("expert", i),
                          nn::Sequential(nn::Linear(kDim, 512), nn::GELU(),
                                         nn::Linear(512, kDim))));
    }
  }
  Tensor Loss() {
    const Tensor x = torch::randn({kTokens, kDim});
    const Tensor weights = torch::softmax(router(x), -1);
    Tensor h = torch::zeros_like(x);
    for (int64_t e = 0; e < kExperts; ++e) {
      const auto [weight, rows] = weights.select(1, e).topk(kCapacity);
      const Tensor out =
          experts[static_cast<size_t>(e)]->forward(x.index_select(0, rows));
      h = h.index_add(0, rows, out * weight.unsqueeze(1));
    }
    return (h - x).square().mean();
  }
  nn::Linear router{nullptr};
  std::vector<nn::Sequential> experts;
};

struct UnetModel : nn::Module {
  static nn::Conv2d Conv(int64_t in, int64_t out, int64_t stride = 1) {
    return nn::Conv2d(nn::Conv2dOptions(in, out, 3).stride(stride).padding(1));
  }
  UnetModel() {
    down1 = register_module("down1", Conv(2, 16));
    down2 = register_module("down2", Conv(16, 32, 2));
    middle = register_module("middle", Conv(32, 64, 2));
    norm = register_module("norm", nn::GroupNorm(nn::GroupNormOptions(4, 64)));
    up2 = register_module("up2", Conv(96, 32));
    up1 = register_module(
        "up1",
        nn::ConvTranspose2d(nn::ConvTranspose2dOptions(32, 16, 2).stride(2)));
    out = register_module("out", Conv(32, 2));
  }
  Tensor Loss() {
    const Tensor a = torch::silu(down1(torch::randn({8, 2, 32, 32})));
    const Tensor b = torch::silu(down2(a));
    const Tensor c = torch::silu(norm(middle(b)));
    const Tensor wide = torch::upsample_nearest2d(c, {16, 16});
    const Tensor d = torch::silu(up2(torch::cat({wide, b}, 1)));
    const Tensor e = torch::silu(up1(d));
    return out(torch::cat({e, a}, 1)).square().mean();
  }
  nn::Conv2d down1{nullptr}, down2{nullptr}, middle{nullptr};
  nn::GroupNorm norm{nullptr};
  nn::Conv2d up2{nullptr}, out{nullptr};
  nn::ConvTranspose2d up1{nullptr};
};

struct LstmModel : nn::Module {
  LstmModel() {
    lstm = register_module("lstm",
                           nn::LSTM(nn::LSTMOptions(64, 128).num_layers(2)));
    head = register_module("head", nn::Linear(128, 32));
  }
  Tensor Loss() {
    const Tensor h = std::get<0>(lstm(torch::randn({24, 16, 64})));
    return head(h).square().mean();
  }
  nn::LSTM lstm{nullptr};
  nn::Linear head{nullptr};
};

// GPT under autocast. Models of 16 bits are smaller: a processor without
// AVX-512 takes ten times as long for their products.
struct AutocastModel : GptModel {
  AutocastModel() { batch = 1; }
  Tensor Loss() {
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const Tensor loss = GptModel::Loss();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
    return loss;
  }
};

struct BfloatModel : GptModel {
  BfloatModel() {
    batch = 1;
    to(torch::kBFloat16);
  }
};

// All but the last block and the head are frozen.
struct FrozenModel : GptModel {
  FrozenModel() {
    for (auto& item : named_parameters()) {
      const std::string& name = item.key();
      if (name.rfind("block2", 0) == 0 || name.rfind("head", 0) == 0) continue;
      item.value().requires_grad_(false);
    }
  }
};

}  // namespace

const std::map<std::string, std::function<TracedModel()>>& TracedModels() {
  static const auto* const models =
      new std::map<std::string, std::function<TracedModel()>>{
          {"Mlp", [] { return Of(std::make_shared<MlpModel>()); }},
          {"Gpt", [] { return Of(std::make_shared<GptModel>()); }},
          {"Llama", [] { return Of(std::make_shared<LlamaModel>()); }},
          {"Cnn", [] { return Of(std::make_shared<CnnModel>()); }},
          {"CnnBf16", [] { return Of(std::make_shared<NarrowCnnModel>()); }},
          {"Encoder", [] { return Of(std::make_shared<EncoderModel>()); }},
          {"Bag", [] { return Of(std::make_shared<BagModel>()); }},
          {"Vae", [] { return Of(std::make_shared<VaeModel>()); }},
          {"Experts", [] { return Of(std::make_shared<ExpertsModel>()); }},
          {"Unet", [] { return Of(std::make_shared<UnetModel>()); }},
          {"Lstm", [] { return Of(std::make_shared<LstmModel>()); }},
          {"Autocast", [] { return Of(std::make_shared<AutocastModel>()); }},
          {"Bfloat16", [] { return Of(std::make_shared<BfloatModel>()); }},
          {"Frozen", [] { return Of(std::make_shared<FrozenModel>()); }},
      };
  return *models;
}

}  // namespace tessera
