// Variants of loops that do more than forward, Backward and Step.
#include <torch/torch.h>

#include <memory>
#include <sstream>
#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "tests/zoo/rig.h"

namespace tessera::zoo {
namespace {

struct Net : nn::Module {
  Net() {
    a = register_module("a", nn::Linear(6, 9));
    b = register_module("b", nn::Linear(9, 9));
    c = register_module("c", nn::Linear(9, 4));
  }
  Tensor forward(const Tensor& x) {
    return c(torch::tanh(b(torch::relu(a(x)))));
  }
  nn::Linear a{nullptr}, b{nullptr}, c{nullptr};
};

Tensor Loss(Rig& rig, Net& net) {
  return rig.Part([&rig, &net] {
    return torch::mse_loss(net.forward(rig.Randn({5, 6})), rig.Randn({5, 4}));
  });
}

void Freeze(nn::Module& module, bool frozen) {
  for (Tensor& p : module.parameters()) p.requires_grad_(!frozen);
}

// ---- gradients of gradients

ZOO_VARIANT(GradientPenalty) {
  auto net = std::make_shared<Net>();
  rig.TrainOn(net, [&] {
    const Tensor x = rig.Randn({5, 6}).requires_grad_(true);
    const Tensor out = net->forward(x).sum();
    const Tensor slope = torch::autograd::grad({out}, {x}, {}, true, true)[0];
    return out + (slope.norm(2, 1) - 1).pow(2).mean();
  });
}

ZOO_VARIANT(PenaltyOnTheGradientOfAWeight) {
  auto net = std::make_shared<Net>();
  rig.TrainOn(net, [&] {
    const Tensor loss = Loss(rig, *net);
    const Tensor slope =
        torch::autograd::grad({loss}, {net->b->weight}, {}, true, true)[0];
    return loss + slope.pow(2).sum();
  });
}

// An inner step of SGD, through which the outer loss goes.
ZOO_VARIANT(Maml) {
  auto net = std::make_shared<Net>();
  rig.TrainOn(net, [&] {
    const std::vector<Tensor> weights = net->parameters();
    const std::vector<Tensor> slopes =
        torch::autograd::grad({Loss(rig, *net)}, weights, {}, true, true);
    std::vector<Tensor> fast;
    for (size_t i = 0; i < weights.size(); ++i) {
      fast.push_back(weights[i] - 0.1 * slopes[i]);
    }
    Tensor h = torch::relu(torch::linear(rig.Randn({5, 6}), fast[0], fast[1]));
    h = torch::tanh(torch::linear(h, fast[2], fast[3]));
    return torch::linear(h, fast[4], fast[5]).pow(2).mean();
  });
}

// The inputs' gradients by a bare grad, then training on other inputs.
ZOO_VARIANT(AdversarialExamples) {
  auto net = std::make_shared<Net>();
  rig.TrainOn(net, [&] {
    const Tensor x = rig.Randn({5, 6}).requires_grad_(true);
    const Tensor slope =
        torch::autograd::grad({net->forward(x).pow(2).sum()}, {x})[0];
    return net->forward((x + 0.1 * slope.sign()).detach()).pow(2).mean();
  });
}

ZOO_VARIANT(SaliencyThenZeroGrad) {
  auto net = std::make_shared<Net>();
  Training* const training = rig.Train(net);
  for (int i = 0; i < 3; ++i) {
    const Tensor x = rig.Randn({5, 6}).requires_grad_(true);
    net->forward(x).sum().backward();
    rig.Note(x.grad());
    net->zero_grad();
    training->Backward(Loss(rig, *net));
    training->Step();
  }
}

ZOO_REFUSED_VARIANT(SaliencyWithoutZeroGrad, "call zero_grad() of the module") {
  auto net = std::make_shared<Net>();
  Training* const training = rig.Train(net);
  net->forward(rig.Randn({5, 6})).sum().backward();
  training->Backward(Loss(rig, *net));
}

// ---- functions of the user's own

struct Cube : torch::autograd::Function<Cube> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x,
                        const Tensor& weight) {
    ctx->save_for_backward({x, weight});
    return torch::mm(x.pow(3), weight);
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* ctx,
      torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    return {torch::mm(grads[0], saved[1].t()) * 3 * saved[0].pow(2),
            torch::mm(saved[0].pow(3).t(), grads[0])};
  }
};

ZOO_VARIANT(FunctionOfTheUsers) {
  auto net = std::make_shared<Net>();
  rig.TrainOn(net, [&] {
    const Tensor h = torch::tanh(net->a(rig.Randn({5, 6})));
    return Cube::apply(h, net->b->weight).pow(2).mean();
  });
}

// Checkpoint runs forward again in backward: a reentrant checkpoint.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x,
                        nn::Linear layer) {
    ctx->save_for_backward({x});
    ctx->saved_data["layer"] =
        torch::IValue(reinterpret_cast<int64_t>(new nn::Linear(layer)));
    torch::NoGradGuard no_grad;
    return torch::tanh(layer(x));
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* ctx,
      torch::autograd::variable_list grads) {
    const std::unique_ptr<nn::Linear> layer(
        reinterpret_cast<nn::Linear*>(ctx->saved_data["layer"].toInt()));
    const Tensor x =
        ctx->get_saved_variables()[0].detach().requires_grad_(true);
    torch::AutoGradMode grad(true);
    torch::autograd::backward({torch::tanh((*layer)(x))}, {grads[0]});
    return {x.grad(), Tensor()};
  }
};

ZOO_VARIANT(ForwardAgainInBackward) {
  auto net = std::make_shared<Net>();
  rig.TrainOn(net, [&] {
    Tensor h = torch::relu(net->a(rig.Randn({5, 6})));
    h = Checkpoint::apply(Checkpoint::apply(h, net->b), net->b);
    return net->c(h).pow(2).mean();
  });
}

ZOO_VARIANT(HooksOnParametersAndActivations) {
  auto net = std::make_shared<Net>();
  net->a->weight.register_hook(
      [](const Tensor& g) { return g.clamp(-0.1, 0.1); });
  rig.TrainOn(net, [&] {
    Tensor h = net->b(torch::relu(net->a(rig.Randn({5, 6}))));
    h.register_hook([](const Tensor& g) { return g * 0.5; });
    return net->c(h).pow(2).mean();
  });
}

// ---- which parameters take part

ZOO_VARIANT(StochasticDepthOfEachRank) {
  auto net = std::make_shared<nn::Module>();
  std::vector<nn::Linear> layers;
  for (int i = 0; i < 5; ++i) {
    layers.push_back(
        net->register_module(absl::StrCat("layer", i), nn::Linear(6, 6)));
  }
  rig.TrainOn(net, [&] {
    Tensor h = rig.Randn({4, 6});
    for (nn::Linear& layer : layers) {
      if (torch::rand({1}).item<float>() > 0.4) h = h + torch::tanh(layer(h));
    }
    return (h * layers[0]->bias).pow(2).mean();
  });
}

ZOO_VARIANT(Unfreezing) {
  auto net = std::make_shared<Net>();
  Freeze(*net->a, true);
  Freeze(*net->b, true);
  Training* const training = rig.Train(net);
  for (int i = 0; i < 5; ++i) {
    if (i == 2) Freeze(*net->b, false);
    if (i == 3) Freeze(*net->a, false);
    if (i == 4) Freeze(*net->c, true);
    training->Backward(Loss(rig, *net));
    training->Step();
  }
}

ZOO_VARIANT(FrozenBackboneInEvaluation) {
  auto net = std::make_shared<nn::Module>();
  nn::Sequential backbone = net->register_module(
      "backbone", nn::Sequential(nn::Conv2d(2, 4, 3), nn::BatchNorm2d(4),
                                 nn::ReLU(), nn::Dropout(0.5)));
  nn::Linear head = net->register_module("head", nn::Linear(4, 3));
  Freeze(*backbone, true);
  backbone->eval();
  rig.TrainOn(net, [&] {
    Tensor h;
    {
      torch::NoGradGuard no_grad;
      h = backbone->forward(rig.Randn({3, 2, 6, 6})).mean({2, 3});
    }
    return head(h).pow(2).mean();
  });
}

ZOO_REFUSED_VARIANT(ParameterAddedLater, "Close() the engine and Create") {
  auto net = std::make_shared<Net>();
  Training* const training = rig.Train(net);
  net->register_module("late", nn::Linear(4, 4));
  training->Backward(Loss(rig, *net));
  training->Step();
}

// ---- several losses, several micro-batches

ZOO_VARIANT(TwoLossesOverOneGraph) {
  auto net = std::make_shared<Net>();
  Training* const training = rig.Train(net);
  for (int i = 0; i < 3; ++i) {
    const Tensor out = rig.Part([&] {
      return net->forward(rig.Randn({5, 6}));
    });
    training->Backward(out.pow(2).mean(), {true, true});
    training->Backward(out.abs().mean());
    training->Step();
  }
}

ZOO_VARIANT(AccumulationWithClipping) {
  auto net = std::make_shared<Net>();
  Recipe recipe;
  recipe.accumulation = 3;
  recipe.clipping = 0.2;
  rig.TrainOn(
      net, [&] { return 3 * Loss(rig, *net); }, recipe);
}

ZOO_REFUSED_VARIANT(StepAfterSeveralBackwards,
                    "call Step after each Backward") {
  auto net = std::make_shared<Net>();
  Recipe recipe;
  recipe.accumulation = 2;
  Training* const training = rig.Train(net, recipe);
  training->Backward(Loss(rig, *net));
  training->Backward(Loss(rig, *net));
  training->Step();
}

ZOO_REFUSED_VARIANT(StepAfterABareBackward, "no Engine::Backward since") {
  auto net = std::make_shared<Net>();
  Training* const training = rig.Train(net);
  Loss(rig, *net).backward();
  training->Step();
}

ZOO_VARIANT(ZeroGradEverywhere) {
  auto net = std::make_shared<Net>();
  Training* const training = rig.Train(net);
  for (int i = 0; i < 3; ++i) {
    net->zero_grad();
    training->Backward(Loss(rig, *net));
    training->Step();
    net->zero_grad();
  }
}

// The engine has the bits of the optimizer of the user's own loop.
ZOO_VARIANT(AdamWOfTorchOptim) {
  auto net = std::make_shared<Net>();
  Recipe recipe;
  recipe.libtorch_exact = true;
  rig.TrainOn(
      net, [&] { return Loss(rig, *net); }, recipe, /*steps=*/5);
}

ZOO_VARIANT(RatesOfTheProgram) {
  auto net = std::make_shared<Net>();
  Training* const training = rig.Train(net);
  for (int i = 0; i < 4; ++i) {
    training->SetRate(0.05 / (1 + i));
    training->Backward(Loss(rig, *net));
    training->Step();
  }
}

}  // namespace
}  // namespace tessera::zoo
