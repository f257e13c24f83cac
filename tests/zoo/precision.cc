// Variants with parameters of 16 bits, and with autocast. Where the engine
// casts inputs (docs/design.md, "Casts of inputs"), a plain loop writes the
// casts out.
#include <torch/torch.h>

#include <memory>

#include "tests/zoo/rig.h"

namespace tessera::zoo {
namespace {

Recipe In(const char* dtype) {
  Recipe recipe;
  recipe.dtype = dtype;
  return recipe;
}

// `x` as an operator of `like` wants it.
Tensor As(Rig& rig, const Tensor& x, const Tensor& like) {
  return rig.plain() ? x.to(like.dtype()) : x;
}

// ---- without casts

void TrainTransformer(Rig& rig, const char* dtype, at::ScalarType type) {
  nn::TransformerEncoder net(nn::TransformerEncoderOptions(
      nn::TransformerEncoderLayerOptions(12, 3).dim_feedforward(17), 2));
  rig.TrainOn(
      net.ptr(),
      [&] {
        return torch::mse_loss(
            net(rig.Randn({5, 3, 12}).to(type)).to(at::kFloat),
            rig.Randn({5, 3, 12}));
      },
      In(dtype));
}

ZOO_VARIANT(TransformerInBfloat16) {
  TrainTransformer(rig, "bf16", torch::kBFloat16);
}
ZOO_VARIANT(TransformerInFloat16) {
  TrainTransformer(rig, "fp16", torch::kHalf);
}

ZOO_VARIANT(AccumulationAndClippingInBfloat16) {
  nn::Sequential net(nn::Linear(6, 9), nn::GELU(), nn::Linear(9, 3));
  Recipe recipe = In("bf16");
  recipe.accumulation = 2;
  recipe.clipping = 0.3;
  rig.TrainOn(
      net.ptr(),
      [&] {
        const Tensor x = rig.Randn({4, 6}).to(torch::kBFloat16);
        return net->forward(x).to(at::kFloat).pow(2).mean();
      },
      recipe);
}

ZOO_VARIANT(ClampedInBfloat16) {
  nn::Sequential net(nn::Linear(6, 9), nn::GELU(), nn::Linear(9, 3));
  rig.TrainOn(
      net.ptr(),
      [&] {
        {
          torch::NoGradGuard no_grad;
          for (Tensor& p : net->parameters()) p.clamp_(-0.2, 0.2);
        }
        const Tensor x = rig.Randn({4, 6}).to(torch::kBFloat16);
        return net->forward(x).to(at::kFloat).pow(2).mean();
      },
      In("bf16"));
}

ZOO_VARIANT(LoraInBfloat16) {
  auto net = std::make_shared<nn::Module>();
  nn::Linear base = net->register_module("base", nn::Linear(6, 6));
  for (Tensor& p : base->parameters()) p.requires_grad_(false);
  Tensor a = net->register_parameter("a", torch::randn({2, 6}));
  Tensor b = net->register_parameter("b", torch::zeros({6, 2}));
  rig.TrainOn(
      net,
      [&] {
        const Tensor x = rig.Randn({4, 6}).to(torch::kBFloat16);
        return (base(x) + torch::linear(torch::linear(x, a), b))
            .to(at::kFloat)
            .pow(2)
            .mean();
      },
      In("bf16"));
}

// ---- inputs that are cast

ZOO_VARIANT(FloatInputsInBfloat16) {
  auto net = std::make_shared<nn::Module>();
  nn::Conv1d conv = net->register_module("conv", nn::Conv1d(3, 4, 3));
  nn::GRU rnn = net->register_module("rnn", nn::GRU(4, 5));
  nn::Linear head = net->register_module("head", nn::Linear(5, 2));
  rig.TrainOn(
      net,
      [&] {
        const Tensor h = conv(As(rig, rig.Randn({2, 3, 7}), conv->weight));
        const Tensor in = h.permute({2, 0, 1});
        const Tensor state = As(rig, torch::zeros({1, 2, 5}), head->weight);
        const Tensor out = std::get<0>(rnn(in, state));
        return head(out).to(at::kFloat).pow(2).mean();
      },
      In("bf16"));
}

// A loss that weighs outputs by a parameter, with float32 data.
ZOO_VARIANT(LossOnCastInputs) {
  auto net = std::make_shared<nn::Module>();
  nn::Linear fc = net->register_module("fc", nn::Linear(6, 4));
  Tensor centers = net->register_parameter("centers", torch::randn({4, 3}));
  rig.TrainOn(
      net,
      [&] {
        const Tensor h = fc(As(rig, rig.Randn({5, 6}), fc->weight));
        const Tensor probabilities = torch::softmax(h.to(at::kFloat), -1);
        return torch::mm(As(rig, probabilities, centers), centers)
            .to(at::kFloat)
            .pow(2)
            .mean();
      },
      In("bf16"));
}

// ---- norms. With running statistics, which stay float32, one is computed in
// float32 and its result cast to the narrower of its input and parameters.

Tensor Batch(Rig& rig, nn::BatchNorm2d& norm, const Tensor& x) {
  if (!rig.plain()) return norm(x);
  norm->num_batches_tracked += 1;
  return torch::batch_norm(x.to(at::kFloat), norm->weight.to(at::kFloat),
                           norm->bias.to(at::kFloat), norm->running_mean,
                           norm->running_var, norm->is_training(), 0.1, 1e-5,
                           false)
      .to(norm->weight.dtype());
}

Tensor Instance(Rig& rig, nn::InstanceNorm2d& norm, const Tensor& x) {
  if (!rig.plain()) return norm(x);
  return torch::instance_norm(x.to(at::kFloat), norm->weight.to(at::kFloat),
                              norm->bias.to(at::kFloat), norm->running_mean,
                              norm->running_var, norm->is_training(), 0.1, 1e-5,
                              false)
      .to(norm->weight.dtype());
}

void TrainNorms(Rig& rig, const Recipe& recipe) {
  auto net = std::make_shared<nn::Module>();
  nn::Conv2d conv = net->register_module("conv", nn::Conv2d(3, 4, 3));
  nn::BatchNorm2d batch = net->register_module("batch", nn::BatchNorm2d(4));
  nn::Conv2d next = net->register_module("next", nn::Conv2d(4, 4, 3));
  nn::InstanceNorm2d instance = net->register_module(
      "instance",
      nn::InstanceNorm2d(
          nn::InstanceNorm2dOptions(4).affine(true).track_running_stats(true)));
  rig.TrainOn(
      net,
      [&] {
        Tensor h = conv(As(rig, rig.Randn({2, 3, 8, 8}), conv->weight));
        h = next(torch::relu(Batch(rig, batch, h)));
        return Instance(rig, instance, h).to(at::kFloat).pow(3).mean();
      },
      recipe);
}

ZOO_VARIANT(RunningStatisticsInBfloat16) { TrainNorms(rig, In("bf16")); }
ZOO_VARIANT(RunningStatisticsInFloat16) { TrainNorms(rig, In("fp16")); }

ZOO_VARIANT(NormsWithoutStatisticsInBfloat16) {
  auto net = std::make_shared<nn::Module>();
  nn::Conv2d conv = net->register_module("conv", nn::Conv2d(3, 4, 3));
  nn::GroupNorm group =
      net->register_module("group", nn::GroupNorm(nn::GroupNormOptions(2, 4)));
  nn::LayerNorm layer = net->register_module(
      "layer", nn::LayerNorm(nn::LayerNormOptions({6, 6})));
  nn::InstanceNorm2d instance = net->register_module(
      "instance",
      nn::InstanceNorm2d(nn::InstanceNorm2dOptions(4).affine(true)));
  rig.TrainOn(
      net,
      [&] {
        const Tensor h = conv(As(rig, rig.Randn({2, 3, 8, 8}), conv->weight));
        return instance(layer(group(h))).to(at::kFloat).pow(3).mean();
      },
      In("bf16"));
}

// Norms keep float32 parameters: computed in these, cast back to the input's.
ZOO_VARIANT(Float32NormsInBfloat16) {
  auto net = std::make_shared<nn::Module>();
  nn::Linear fc = net->register_module("fc", nn::Linear(6, 6));
  nn::LayerNorm norm =
      net->register_module("norm", nn::LayerNorm(nn::LayerNormOptions({6})));
  nn::Linear head = net->register_module("head", nn::Linear(6, 3));
  Recipe recipe = In("bf16");
  recipe.fp32_norms = true;
  rig.TrainOn(
      net,
      [&] {
        const Tensor h = fc(As(rig, rig.Randn({5, 6}), fc->weight));
        const Tensor n =
            rig.plain() ? norm(h.to(at::kFloat)).to(torch::kBFloat16) : norm(h);
        return head(n).to(at::kFloat).pow(2).mean();
      },
      recipe);
}

// ---- autocast: plain libtorch's own in both

ZOO_VARIANT(ConvolutionsAndNormsUnderAutocast) {
  auto net = std::make_shared<nn::Module>();
  nn::Conv2d conv = net->register_module("conv", nn::Conv2d(3, 4, 3));
  nn::BatchNorm2d batch = net->register_module("batch", nn::BatchNorm2d(4));
  nn::GroupNorm group =
      net->register_module("group", nn::GroupNorm(nn::GroupNormOptions(2, 4)));
  nn::Linear head = net->register_module("head", nn::Linear(4, 3));
  Recipe recipe;
  recipe.autocast = "bfloat16";
  rig.TrainOn(
      net,
      [&] {
        const Tensor h =
            group(torch::relu(batch(conv(rig.Randn({2, 3, 6, 6})))));
        return torch::cross_entropy_loss(head(h.mean({2, 3})).to(at::kFloat),
                                         rig.Tokens(3, {2}));
      },
      recipe);
}

ZOO_VARIANT(TransformerUnderAutocast) {
  nn::TransformerEncoder net(nn::TransformerEncoderOptions(
      nn::TransformerEncoderLayerOptions(12, 3).dim_feedforward(17), 1));
  Recipe recipe;
  recipe.autocast = "bfloat16";
  rig.TrainOn(
      net.ptr(),
      [&] {
        return torch::mse_loss(net(rig.Randn({5, 3, 12})).to(at::kFloat),
                               rig.Randn({5, 3, 12}));
      },
      recipe);
}

}  // namespace
}  // namespace tessera::zoo
