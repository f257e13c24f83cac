// Models of plan_truth_test that are nowhere else: what test models of a few
// kilobytes (tests/models) do, with tensors beside which a kernel's own memory
// is small.
#include <torch/torch.h>

#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/plan/truth.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using at::Tensor;

template <typename M>
TruthModel Of(std::shared_ptr<M> module) {
  return {module, [module] { return module->Loss(); }};
}

// Bottlenecks with batch norm, a shortcut of its own where sizes change.
struct ResnetModel : nn::Module {
  struct Block : nn::Module {
    Block(int64_t in, int64_t out, int64_t stride) {
      const int64_t narrow = out / 2;
      layers = register_module(
          "layers",
          nn::Sequential(
              nn::Conv2d(nn::Conv2dOptions(in, narrow, 1).bias(false)),
              nn::BatchNorm2d(narrow), nn::ReLU(),
              nn::Conv2d(nn::Conv2dOptions(narrow, narrow, 3)
                             .stride(stride)
                             .padding(1)
                             .bias(false)),
              nn::BatchNorm2d(narrow), nn::ReLU(),
              nn::Conv2d(nn::Conv2dOptions(narrow, out, 1).bias(false)),
              nn::BatchNorm2d(out)));
      if (in == out && stride == 1) return;
      shortcut = register_module(
          "shortcut",
          nn::Sequential(
              nn::Conv2d(
                  nn::Conv2dOptions(in, out, 1).stride(stride).bias(false)),
              nn::BatchNorm2d(out)));
    }
    Tensor forward(const Tensor& x) {
      const Tensor across = shortcut.is_empty() ? x : shortcut->forward(x);
      return torch::relu(layers->forward(x) + across);
    }
    nn::Sequential layers{nullptr}, shortcut{nullptr};
  };
  ResnetModel() {
    stem = register_module("stem",
                           nn::Conv2d(nn::Conv2dOptions(3, 32, 3).padding(1)));
    for (int64_t i = 0; i < 4; ++i) {
      blocks.push_back(register_module(
          absl::StrCat("block", i),
          std::make_shared<Block>(i == 0 ? 32 : 128, 128, i == 2 ? 2 : 1)));
    }
    head = register_module("head", nn::Linear(128, 10));
  }
  Tensor Loss() {
    Tensor x = stem(torch::randn({8, 3, 24, 24}));
    for (auto& block : blocks) x = block->forward(x);
    return nn::functional::cross_entropy(head(x.mean({2, 3})),
                                         torch::randint(10, {8}, torch::kLong));
  }
  nn::Conv2d stem{nullptr};
  std::vector<std::shared_ptr<Block>> blocks;
  nn::Linear head{nullptr};
};

// Patches, a class's token, attention by torch::nn.
struct VitModel : nn::Module {
  static constexpr int64_t kDim = 192, kPatches = 64;
  VitModel() {
    patches = register_module(
        "patches", nn::Conv2d(nn::Conv2dOptions(3, kDim, 8).stride(8)));
    token = register_parameter("token", torch::zeros({1, 1, kDim}));
    places =
        register_parameter("places", torch::zeros({kPatches + 1, 1, kDim}));
    encoder = register_module(
        "encoder",
        nn::TransformerEncoder(nn::TransformerEncoderOptions(
            nn::TransformerEncoderLayerOptions(kDim, 6).dim_feedforward(768),
            3)));
    head = register_module("head", nn::Linear(kDim, 10));
  }
  Tensor Loss() {
    const Tensor images = torch::randn({4, 3, 64, 64});
    Tensor x = patches(images).flatten(2).permute({2, 0, 1});
    x = torch::cat({token.expand({1, 4, kDim}).to(x.dtype()), x}) + places;
    return nn::functional::cross_entropy(head(encoder(x)[0]),
                                         torch::randint(10, {4}, torch::kLong));
  }
  nn::Conv2d patches{nullptr};
  Tensor token, places;
  nn::TransformerEncoder encoder{nullptr};
  nn::Linear head{nullptr};
};

// The model has an encoder and a decoder, which both use one table.
struct TranslatorModel : nn::Module {
  static constexpr int64_t kDim = 128, kWords = 600;
  TranslatorModel() {
    table = register_module("table", nn::Embedding(kWords, kDim));
    transformer = register_module(
        "transformer", nn::Transformer(nn::TransformerOptions(kDim, 4)
                                           .num_encoder_layers(2)
                                           .num_decoder_layers(2)
                                           .dim_feedforward(512)));
  }
  Tensor Loss() {
    const Tensor from = torch::randint(kWords, {40, 4}, torch::kLong);
    const Tensor to = torch::randint(kWords, {32, 4}, torch::kLong);
    const Tensor x = transformer(table(from), table(to));
    return nn::functional::cross_entropy(
        x.flatten(0, 1).matmul(table->weight.t()), to.flatten());
  }
  nn::Embedding table{nullptr};
  nn::Transformer transformer{nullptr};
};

// One layer, four times.
struct RepeatedModel : nn::Module {
  RepeatedModel() {
    in = register_module("in", nn::Linear(128, 256));
    up = register_module("up", nn::Linear(256, 768));
    down = register_module("down", nn::Linear(768, 256));
  }
  Tensor Loss() {
    Tensor x = in(torch::randn({256, 128}));
    for (int i = 0; i < 4; ++i) x = x + down(torch::gelu(up(x)));
    return x.square().mean();
  }
  nn::Linear in{nullptr}, up{nullptr}, down{nullptr};
};

}  // namespace

const std::map<std::string, std::function<TruthModel()>>& OwnTruthModels() {
  static const auto* const models =
      new std::map<std::string, std::function<TruthModel()>>{
          {"Resnet", [] { return Of(std::make_shared<ResnetModel>()); }},
          {"Vit", [] { return Of(std::make_shared<VitModel>()); }},
          {"Translator",
           [] { return Of(std::make_shared<TranslatorModel>()); }},
          {"Repeated", [] { return Of(std::make_shared<RepeatedModel>()); }},
      };
  return *models;
}

}  // namespace tessera
