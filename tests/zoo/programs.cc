// Variants of programs that read or write parameters beside the training, train
// two modules, or differ between ranks.
#include <torch/torch.h>

#include <memory>
#include <sstream>
#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "tests/zoo/rig.h"

namespace tessera::zoo {
namespace {

struct MixedNet : nn::Module {
  MixedNet() {
    a = register_module("a", nn::Linear(6, 9));
    norm = register_module("norm", nn::BatchNorm1d(9));
    drop = register_module("drop", nn::Dropout(0.2));
    c = register_module("c", nn::Linear(9, 6));
  }
  Tensor forward(const Tensor& x) { return c(drop(torch::relu(norm(a(x))))); }
  nn::Linear a{nullptr}, c{nullptr};
  nn::BatchNorm1d norm{nullptr};
  nn::Dropout drop{nullptr};
};

Tensor MixedLoss(Rig& rig, MixedNet& net) {
  return rig.Part([&rig, &net] {
    return torch::mse_loss(net.forward(rig.Randn({5, 6})), rig.Randn({5, 6}));
  });
}

// Three steps, `between` after each.
void TrainAnd(Rig& rig, std::shared_ptr<MixedNet> net,
              const std::function<void()>& between) {
  Training* const training = rig.Train(net);
  for (int i = 0; i < 3; ++i) {
    const Tensor loss = MixedLoss(rig, *net);
    rig.Note(loss);
    training->Backward(loss);
    training->Step();
    between();
  }
}

// ---- writes to parameters

ZOO_VARIANT(ClampedAsACritic) {
  auto net = std::make_shared<MixedNet>();
  TrainAnd(rig, net, [&] {
    torch::NoGradGuard no_grad;
    for (Tensor& p : net->parameters()) p.clamp_(-0.2, 0.2);
  });
}

ZOO_VARIANT(ClampedThroughData) {
  auto net = std::make_shared<MixedNet>();
  TrainAnd(rig, net, [&] {
    for (Tensor& p : net->parameters()) p.data().clamp_(-0.2, 0.2);
  });
}

ZOO_VARIANT(LayerMadeAnew) {
  auto net = std::make_shared<MixedNet>();
  TrainAnd(rig, net, [&] {
    torch::NoGradGuard no_grad;
    net->c->weight.copy_(rig.Same({6, 9}));
    nn::init::zeros_(net->c->bias);
  });
}

ZOO_VARIANT(ParametersAsOneVector) {
  auto net = std::make_shared<MixedNet>();
  TrainAnd(rig, net, [&] {
    torch::NoGradGuard no_grad;
    const Tensor all = nn::utils::parameters_to_vector(net->parameters());
    rig.Note(all);
    nn::utils::vector_to_parameters(all * 0.9, net->parameters());
  });
}

ZOO_VARIANT(DataReplaced) {
  auto net = std::make_shared<MixedNet>();
  TrainAnd(rig, net, [&] { net->a->weight.set_data(rig.Same({9, 6})); });
}

// The best values so far are kept, and put back at last.
ZOO_VARIANT(BestValuesPutBack) {
  auto net = std::make_shared<MixedNet>();
  std::vector<Tensor> best;
  for (const Tensor& p : net->parameters()) best.push_back(p.detach().clone());
  int step = 0;
  TrainAnd(rig, net, [&] {
    torch::NoGradGuard no_grad;
    const std::vector<Tensor> parameters = net->parameters();
    for (size_t i = 0; i < best.size(); ++i) {
      (step == 1 ? parameters[i] : best[i])
          .copy_(step == 1 ? best[i] : parameters[i]);
    }
    ++step;
  });
}

ZOO_VARIANT(LoadedFromAFile) {
  auto net = std::make_shared<MixedNet>();
  std::ostringstream out;
  torch::save(net, out);
  TrainAnd(rig, net, [&] {
    std::istringstream in(out.str());
    torch::load(net, in);
  });
}

// Reads through raw pointers.
ZOO_GUARDED_VARIANT(SavedToAFile, "tessera::Use(w);") {
  auto net = std::make_shared<MixedNet>();
  TrainAnd(rig, net, [&] {
    std::ostringstream out;
    torch::save(net, out);
  });
}

ZOO_VARIANT(NoiseOnWeights) {
  auto net = std::make_shared<MixedNet>();
  rig.TrainOn(net, [&] {
    const Tensor noisy = net->a->weight + 0.1 * rig.Randn({9, 6});
    return net->c(torch::relu(torch::linear(rig.Randn({5, 6}), noisy)))
        .pow(2)
        .mean();
  });
}

// ---- copies and aliases

ZOO_VARIANT(MovingAverageOfWeights) {
  auto net = std::make_shared<MixedNet>();
  std::vector<Tensor> average;
  for (const Tensor& p : net->parameters())
    average.push_back(p.detach().clone());
  TrainAnd(rig, net, [&] {
    torch::NoGradGuard no_grad;
    const std::vector<Tensor> parameters = net->parameters();
    for (size_t i = 0; i < average.size(); ++i) {
      average[i].lerp_(parameters[i], 0.1);
      rig.Note(average[i]);
    }
  });
}

// A target network that follows, outside of the engine.
ZOO_VARIANT(Byol) {
  auto net = std::make_shared<MixedNet>();
  auto target = std::make_shared<MixedNet>();
  Training* const training = rig.Train(net);
  for (int i = 0; i < 3; ++i) {
    const Tensor x = rig.Randn({5, 6});
    Tensor goal;
    {
      torch::NoGradGuard no_grad;
      goal = target->forward(x + 0.1);
    }
    const Tensor loss = rig.Part([&] {
      return 2 - 2 * torch::cosine_similarity(net->forward(x), goal).mean();
    });
    rig.Note(loss);
    training->Backward(loss);
    training->Step();
    torch::NoGradGuard no_grad;
    const auto from = net->named_parameters();
    for (auto& p : target->named_parameters()) {
      p.value().mul_(0.9).add_(from[p.key()], 0.1);
    }
  }
}

ZOO_VARIANT(DetachedAliasOfAWeight) {
  auto net = std::make_shared<MixedNet>();
  Training* const training = rig.Train(net);
  const Tensor alias = net->a->weight.detach();
  for (int i = 0; i < 3; ++i) {
    const Tensor loss = MixedLoss(rig, *net) + (net->a->weight * alias).sum();
    training->Backward(loss);
    training->Step();
    rig.Note(alias);
  }
}

// The engine may not know it for one.
ZOO_GUARDED_VARIANT(AliasFromBefore, "tessera::Use(w);") {
  auto net = std::make_shared<MixedNet>();
  const Tensor alias = net->a->weight.detach();
  const Tensor row = net->a->weight.data().select(0, 1);
  TrainAnd(rig, net, [&] {
    rig.Note(alias + 0);
    rig.Note(row * 2);
  });
}

ZOO_VARIANT(CloneAsATeacher) {
  auto net = std::make_shared<MixedNet>();
  TrainAnd(rig, net, [&] {
    std::vector<Tensor> values;
    for (const Tensor& p : net->parameters()) values.push_back(p.clone());
    rig.Note(torch::linear(rig.Same({2, 6}), values[0], values[1]).detach());
  });
}

// ---- evaluation

ZOO_VARIANT(EvaluationBetweenSteps) {
  auto net = std::make_shared<MixedNet>();
  TrainAnd(rig, net, [&] {
    net->eval();
    {
      torch::NoGradGuard no_grad;
      rig.Note(net->forward(rig.Randn({3, 6})));
    }
    net->train();
  });
}

ZOO_VARIANT(InferenceModeOnOneRank) {
  auto net = std::make_shared<MixedNet>();
  TrainAnd(rig, net, [&] {
    if (rig.rank() == 1) return;
    net->eval();
    {
      c10::InferenceMode inference;
      rig.Note(net->forward(rig.Randn({3, 6})).clone());
    }
    net->train();
  });
}

// A batch is bad on rank 1: both drop the micro-batch.
ZOO_VARIANT(LossThatCountsForNothing) {
  auto net = std::make_shared<MixedNet>();
  Training* const training = rig.Train(net);
  for (int i = 0; i < 3; ++i) {
    Tensor loss = MixedLoss(rig, *net);
    if (i == 1 && rig.rank() == 1) loss = loss * 0;
    training->Backward(loss);
    training->Step();
  }
}

ZOO_REFUSED_VARIANT(ForwardThatThrowsOnOneRank, "the loss is undefined") {
  auto net = std::make_shared<MixedNet>();
  Training* const training = rig.Train(net);
  Tensor loss;
  try {
    if (rig.rank() == 1) throw std::runtime_error("a bad sample");
    loss = MixedLoss(rig, *net);
  } catch (const std::runtime_error&) {
  }
  training->Backward(loss);
}

// ---- two modules

ZOO_VARIANT(GeneratorAgainstCritic) {
  nn::Sequential generator(nn::Linear(4, 9), nn::ReLU(), nn::Linear(9, 6));
  nn::Sequential critic(nn::Linear(6, 9), nn::LeakyReLU(), nn::Linear(9, 1));
  Training* const of_critic = rig.Train(critic.ptr());
  Training* const of_generator = rig.Train(generator.ptr());
  for (int i = 0; i < 3; ++i) {
    critic->zero_grad();
    const Tensor noise = rig.Randn({5, 4});
    const Tensor fake = rig.Part([&] { return generator->forward(noise); });
    of_critic->Backward(rig.Part([&] {
      return torch::softplus(critic->forward(fake.detach())).mean() +
             torch::softplus(-critic->forward(rig.Randn({5, 6}))).mean();
    }));
    of_critic->Step();
    of_generator->Backward(rig.Part(
        [&] { return torch::softplus(-critic->forward(fake)).mean(); }));
    of_generator->Step();
  }
  critic->zero_grad();
}

ZOO_VARIANT(IgnoredParameters) {
  auto net = std::make_shared<MixedNet>();
  Recipe recipe;
  recipe.ignored = {"c.bias"};
  rig.TrainOn(
      net,
      [&] {
        const Tensor loss = MixedLoss(rig, *net);
        net->c->bias.mutable_grad().reset();
        return loss;
      },
      recipe);
}

// ---- what the engine's gradients are not for

ZOO_REFUSED_VARIANT(OwnClipGradNorm, "gradient_clipping") {
  auto net = std::make_shared<MixedNet>();
  Training* const training = rig.Train(net);
  training->Backward(MixedLoss(rig, *net));
  nn::utils::clip_grad_norm_(net->parameters(), 0.1);
  training->Step();
}

ZOO_REFUSED_VARIANT(GradLookedAtOnOneRank, "Engine::Gradient") {
  auto net = std::make_shared<MixedNet>();
  Training* const training = rig.Train(net);
  training->Backward(MixedLoss(rig, *net));
  if (rig.rank() == 1) (void)net->a->weight.grad();
  training->Step();
}

ZOO_REFUSED_VARIANT(OwnOptimizer, "Engine::Step") {
  auto net = std::make_shared<MixedNet>();
  torch::optim::AdamW optimizer(net->parameters());
  Training* const training = rig.Train(net);
  for (int i = 0; i < 2; ++i) {
    optimizer.zero_grad();
    training->Backward(MixedLoss(rig, *net));
    optimizer.step();
  }
}

}  // namespace
}  // namespace tessera::zoo
