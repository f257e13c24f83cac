// Variants of kinds of layers and of parameters.
#include <torch/torch.h>

#include <memory>

#include "absl/strings/str_cat.h"
#include "tests/zoo/rig.h"

namespace tessera::zoo {
namespace {

// A module with one parameter of each given size, w0, w1, ...
struct Weights : nn::Module {
  explicit Weights(const std::vector<std::vector<int64_t>>& sizes,
                   at::ScalarType dtype = torch::kFloat) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      w.push_back(register_parameter(absl::StrCat("w", i),
                                     0.3 * torch::randn(sizes[i], dtype)));
    }
  }
  std::vector<Tensor> w;
};

// ---- weights that are made of parameters

ZOO_VARIANT(WeightNorm) {
  auto net = std::make_shared<Weights>(
      std::vector<std::vector<int64_t>>{{7, 1}, {7, 5}, {7}});
  rig.TrainOn(net, [&] {
    const Tensor weight = torch::_weight_norm(net->w[1], net->w[0], 0);
    return torch::linear(rig.Randn({4, 5}), weight, net->w[2]).pow(2).mean();
  });
}

// Each forward makes a step of the power iteration, in a buffer.
ZOO_VARIANT(SpectralNorm) {
  auto net =
      std::make_shared<Weights>(std::vector<std::vector<int64_t>>{{7, 5}});
  Tensor u = net->register_buffer("u", torch::ones({7}));
  rig.TrainOn(net, [&] {
    const Tensor& weight = net->w[0];
    Tensor v;
    {
      torch::NoGradGuard no_grad;
      v = torch::mv(weight.t(), u);
      v /= v.norm();
      u.copy_(torch::mv(weight, v));
      u /= u.norm();
    }
    const Tensor sigma = torch::dot(u.clone(), torch::mv(weight, v));
    return torch::linear(rig.Randn({4, 5}), weight / sigma).pow(2).mean();
  });
}

struct LoraLayer : nn::Module {
  LoraLayer() {
    base = register_module("base", nn::Linear(6, 6));
    for (Tensor& p : base->parameters()) p.requires_grad_(false);
    a = register_parameter("a", 0.3 * torch::randn({2, 6}));
    b = register_parameter("b", torch::zeros({6, 2}));
  }
  Tensor forward(const Tensor& x) {
    return base(x) + torch::linear(torch::linear(x, a), b);
  }
  nn::Linear base{nullptr};
  Tensor a, b;
};

ZOO_VARIANT(Lora) {
  auto net = std::make_shared<LoraLayer>();
  rig.TrainOn(net, [&] {
    return net->forward(torch::tanh(net->forward(rig.Randn({4, 6}))))
        .pow(2)
        .mean();
  });
}

ZOO_VARIANT(PrunedByAMask) {
  auto net =
      std::make_shared<Weights>(std::vector<std::vector<int64_t>>{{5, 5}});
  const Tensor mask = net->register_buffer(
      "mask", (torch::rand({5, 5}) > 0.5).to(torch::kFloat));
  rig.TrainOn(net, [&] {
    return torch::mm(rig.Randn({3, 5}), net->w[0] * mask).pow(2).mean();
  });
}

ZOO_VARIANT(LinearAlgebraOfParameters) {
  auto net = std::make_shared<Weights>(
      std::vector<std::vector<int64_t>>{{4, 4}, {4, 3}});
  rig.TrainOn(net, [&] {
    const Tensor a = torch::mm(net->w[0], net->w[0].t()) + torch::eye(4);
    const Tensor x = torch::linalg_solve(a, net->w[1]);
    return torch::logdet(a) + torch::mm(rig.Randn({2, 4}), x).pow(2).mean() +
           torch::einsum("ij,jk,ik->", {net->w[0], net->w[1], net->w[1]});
  });
}

// ---- kinds of parameters

ZOO_VARIANT(Float64) {
  nn::Sequential net(nn::Linear(6, 9), nn::Tanh(), nn::Linear(9, 3));
  net->to(torch::kDouble);
  rig.TrainOn(net.ptr(), [&] {
    return net->forward(rig.Randn({4, 6}).to(torch::kDouble)).pow(2).mean();
  });
}

ZOO_VARIANT(ComplexSpectrum) {
  auto net = std::make_shared<Weights>(
      std::vector<std::vector<int64_t>>{{3, 5}}, torch::kComplexFloat);
  rig.TrainOn(net, [&] {
    const Tensor spectrum = torch::fft_rfft(rig.Randn({2, 3, 8}));
    return torch::fft_irfft(spectrum * net->w[0], 8).pow(2).mean();
  });
}

ZOO_VARIANT(ScalarsAndEmptyOnes) {
  auto net = std::make_shared<Weights>(
      std::vector<std::vector<int64_t>>{{}, {1}, {0, 3}});
  nn::PReLU act = net->register_module("act", nn::PReLU());
  rig.TrainOn(net, [&] {
    return (act(rig.Randn({9})) * net->w[0].exp() + net->w[1]).pow(2).mean();
  });
}

ZOO_VARIANT(ListsAndDictionaries) {
  auto net = std::make_shared<nn::Module>();
  nn::ParameterList list = net->register_module("list", nn::ParameterList());
  nn::ParameterDict dict = net->register_module("dict", nn::ParameterDict());
  for (int i = 0; i < 3; ++i) list->append(torch::randn({4, 4}));
  list->append(torch::randn({4}).requires_grad_(true));
  dict->insert("scale", torch::ones({4}));
  dict->insert("shift", torch::zeros({4}).requires_grad_(true));
  rig.TrainOn(net, [&] {
    Tensor h = rig.Randn({2, 4});
    for (int i = 0; i < 3; ++i) h = torch::tanh(torch::mm(h, (*list)[i]));
    return (h * (*list)[3] * dict->get("scale") + dict->get("shift"))
        .pow(2)
        .sum();
  });
}

ZOO_VARIANT(IntegersAndBooleans) {
  auto net =
      std::make_shared<Weights>(std::vector<std::vector<int64_t>>{{6, 4}});
  const Tensor index = net->register_parameter(
      "index", torch::randint(6, {5}, torch::kLong), /*requires_grad=*/false);
  const Tensor mask = net->register_parameter("mask", torch::rand({4}) > 0.3,
                                              /*requires_grad=*/false);
  rig.TrainOn(net, [&] {
    return (net->w[0].index_select(0, index) * mask * rig.Randn({5, 4}))
        .pow(2)
        .mean();
  });
}

// A module and a parameter have two names each.
ZOO_VARIANT(SharedByTwoModules) {
  auto net = std::make_shared<nn::Module>();
  nn::Linear first = net->register_module("first", nn::Linear(5, 5));
  net->register_module("again", first);
  auto other = net->register_module("other", std::make_shared<nn::Module>());
  const Tensor weight = other->register_parameter("weight", first->weight);
  rig.TrainOn(net, [&] {
    const Tensor h = torch::tanh(first(rig.Randn({3, 5})));
    return torch::linear(torch::tanh(first(h)), weight.t()).pow(2).mean();
  });
}

// One storage that a program cuts into parameters.
ZOO_VARIANT(PartsOfOneTensor) {
  auto net = std::make_shared<nn::Module>();
  const Tensor all = 0.3 * torch::randn({41});
  Tensor a = net->register_parameter("a", all.narrow(0, 1, 15).view({3, 5}));
  Tensor b = net->register_parameter("b", all.narrow(0, 20, 5));
  rig.TrainOn(net, [&] {
    return torch::linear(torch::tanh(torch::linear(rig.Randn({4, 5}), a)),
                         a.t(), b)
        .pow(2)
        .mean();
  });
}

// ---- tables

ZOO_VARIANT(SparseEmbedding) {
  nn::Embedding net(nn::EmbeddingOptions(13, 5).sparse(true));
  rig.TrainOn(net.ptr(), [&] {
    return net(rig.Tokens(13, {4, 3})).pow(2).mean();
  });
}

ZOO_VARIANT(EmbeddingWithPadding) {
  nn::Embedding net(nn::EmbeddingOptions(13, 5).padding_idx(2));
  rig.TrainOn(net.ptr(), [&] {
    return (net(rig.Tokens(13, {4, 3})) * rig.Randn({4, 3, 5})).sum();
  });
}

// Writes to its weight in the forward, all ranks the same.
ZOO_VARIANT(EmbeddingWithMaxNorm) {
  nn::Embedding net(nn::EmbeddingOptions(9, 5).max_norm(1.0));
  const Tensor tokens = torch::arange(9);
  rig.TrainOn(net.ptr(), [&] {
    return (net(tokens) * rig.Randn({9, 5})).sum();
  });
}

ZOO_VARIANT(EmbeddingBag) {
  nn::EmbeddingBag net(nn::EmbeddingBagOptions(17, 6).mode(torch::kMean));
  rig.TrainOn(net.ptr(), [&] {
    return net->forward(rig.Tokens(17, {8}), torch::tensor({0, 3, 5}))
        .pow(2)
        .mean();
  });
}

ZOO_VARIANT(Bilinear) {
  nn::Bilinear net(4, 5, 3);
  rig.TrainOn(net.ptr(), [&] {
    return net(rig.Randn({6, 4}), rig.Randn({6, 5})).abs().mean();
  });
}

// A codebook of moving averages in a buffer.
ZOO_VARIANT(VectorQuantisation) {
  auto net = std::make_shared<nn::Module>();
  nn::Linear encoder = net->register_module("encoder", nn::Linear(6, 4));
  nn::Linear decoder = net->register_module("decoder", nn::Linear(4, 6));
  Tensor codes = net->register_buffer("codes", torch::randn({5, 4}));
  rig.TrainOn(net, [&] {
    const Tensor x = rig.Randn({7, 6});
    const Tensor h = encoder(x);
    const Tensor nearest = torch::cdist(h.detach(), codes).argmin(1);
    const Tensor code = codes.index_select(0, nearest);
    codes.index_add_(0, nearest, 0.1 * (h.detach() - code));
    const Tensor through = h + (code - h).detach();
    return torch::mse_loss(decoder(through), x) + (h - code).pow(2).mean();
  });
}

// ---- norms

ZOO_VARIANT(GroupLayerAndInstanceNorm) {
  auto net = std::make_shared<nn::Module>();
  nn::GroupNorm group =
      net->register_module("group", nn::GroupNorm(nn::GroupNormOptions(2, 6)));
  nn::LayerNorm layer = net->register_module(
      "layer", nn::LayerNorm(nn::LayerNormOptions({5, 5})));
  nn::InstanceNorm2d instance = net->register_module(
      "instance",
      nn::InstanceNorm2d(nn::InstanceNorm2dOptions(6).affine(true)));
  rig.TrainOn(net, [&] {
    return instance(layer(group(rig.Randn({2, 6, 5, 5})))).pow(3).mean();
  });
}

ZOO_VARIANT(RootMeanSquareNorm) {
  auto net = std::make_shared<Weights>(
      std::vector<std::vector<int64_t>>{{6}, {6}, {6, 6}});
  rig.TrainOn(net, [&] {
    const Tensor x = torch::mm(rig.Randn({4, 6}), net->w[2]);
    const Tensor by_hand =
        x * torch::rsqrt(x.pow(2).mean(-1, true) + 1e-6) * net->w[0];
    return torch::rms_norm(by_hand, {6}, net->w[1]).pow(3).mean();
  });
}

ZOO_VARIANT(NormsWithRunningStatistics) {
  auto net = std::make_shared<nn::Module>();
  nn::Conv2d conv = net->register_module("conv", nn::Conv2d(3, 4, 3));
  nn::BatchNorm2d batch = net->register_module(
      "batch",
      nn::BatchNorm2d(nn::BatchNorm2dOptions(4).momentum(std::nullopt)));
  nn::InstanceNorm2d instance = net->register_module(
      "instance",
      nn::InstanceNorm2d(
          nn::InstanceNorm2dOptions(4).affine(true).track_running_stats(true)));
  rig.TrainOn(net, [&] {
    return instance(batch(conv(rig.Randn({2, 3, 6, 6})))).pow(3).mean();
  });
}

// Running statistics of a frozen norm stay what they are.
ZOO_VARIANT(FrozenNormInEvaluation) {
  auto net = std::make_shared<nn::Module>();
  nn::Linear fc = net->register_module("fc", nn::Linear(5, 4));
  nn::BatchNorm1d norm = net->register_module("norm", nn::BatchNorm1d(4));
  norm->eval();
  for (Tensor& p : norm->parameters()) p.requires_grad_(false);
  rig.TrainOn(net, [&] { return norm(fc(rig.Randn({6, 5}))).pow(2).mean(); });
}

// ---- losses

ZOO_VARIANT(WeightedAndSmoothedLosses) {
  nn::Sequential net(nn::Linear(5, 4), nn::Dropout(0.3), nn::ReLU(),
                     nn::Linear(4, 3));
  const Tensor weight = torch::tensor({0.2, 0.5, 0.3}, torch::kFloat);
  rig.TrainOn(net.ptr(), [&] {
    namespace F = nn::functional;
    const Tensor logits = net->forward(rig.Randn({6, 5}));
    const Tensor target = rig.Tokens(3, {6});
    return F::cross_entropy(
               logits, target,
               F::CrossEntropyFuncOptions().weight(weight).label_smoothing(
                   0.1)) +
           F::multi_margin_loss(logits, target) +
           F::binary_cross_entropy_with_logits(
               logits, F::one_hot(target, 3).to(torch::kFloat)) +
           F::huber_loss(logits, rig.Randn({6, 3})) +
           0.01 * F::kl_div(torch::log_softmax(logits, -1),
                            torch::softmax(rig.Randn({6, 3}), -1));
  });
}

// A penalty on the weights themselves, without data.
ZOO_VARIANT(WeightPenalty) {
  nn::Sequential net(nn::Linear(5, 4), nn::Tanh(), nn::Linear(4, 3));
  rig.TrainOn(net.ptr(), [&] {
    Tensor loss = net->forward(rig.Randn({6, 5})).pow(2).mean();
    for (const Tensor& p : net->parameters()) loss = loss + 0.1 * p.abs().sum();
    return loss;
  });
}

}  // namespace
}  // namespace tessera::zoo
