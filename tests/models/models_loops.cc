// Test models: what a training loop does besides one forward and one backward.
#include <torch/torch.h>

#include <random>
#include <vector>

#include "sharding/recompute/checkpointed/checkpointed.h"
#include "tests/models/models_internal.h"
#include "tests/models/recomputed.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using at::Tensor;

// Blocks of a type of their own, so that each is a unit.
struct LoopBlockImpl : nn::Module {
  explicit LoopBlockImpl(int64_t dim)
      : up(register_module("up", nn::Linear(dim, 2 * dim + 1))),
        down(register_module("down", nn::Linear(2 * dim + 1, dim))) {}
  Tensor forward(const Tensor& x) { return x + down(torch::tanh(up(x))); }
  nn::Linear up, down;
};
TORCH_MODULE(LoopBlock);

class Blocks : public TestModel {
 protected:
  static constexpr int64_t kDim = 12;

  Blocks() {
    in_ = register_module("in", nn::Linear(7, kDim));
    for (int i = 0; i < 3; ++i) blocks_->push_back(LoopBlock(kDim));
    register_module("blocks", blocks_);
    out_ = register_module("out", nn::Linear(kDim, 3));
  }
  Tensor Block(size_t i, const Tensor& x) {
    return blocks_->ptr<LoopBlockImpl>(i)->forward(x);
  }
  // Through these blocks, in this order.
  Tensor Forward(const Tensor& x, const std::vector<size_t>& path) {
    Tensor h = in_(x);
    for (size_t i : path) h = Block(i, h);
    return out_(h);
  }
  static std::vector<size_t> Whole() { return {0, 1, 2}; }

  nn::Linear in_{nullptr}, out_{nullptr};
  nn::ModuleList blocks_;
};

class Recomputing : public Blocks {
 public:
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(*this, rank, micro_batch);
    Tensor h = in_(inputs.Normal({5, 7}));
    for (size_t i : {0, 1, 0}) {
      h = RecomputedSegment::apply(
          h, RecomputedSegment::Segment(
                 [this, i](const Tensor& x) { return Block(i, x); }));
    }
    return MseLoss(out_(Block(2, h)), inputs.Target({5, 3}));
  }
};

// Regions of tessera::Checkpointed, which plain libtorch does not have computed
// again: an oracle of theirs, too.
class Checkpointing : public Blocks {
 public:
  Checkpointing() {
    calls_ = register_buffer("calls", torch::zeros({1}, torch::kFloat));
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(*this, rank, micro_batch);
    Tensor h = in_(inputs.Normal({5, 7}));
    for (size_t i : {0, 1, 0}) {
      h = Checkpointed([this, i](const Tensor& x) { return Counted(i, x); }, h);
    }
    // One within the other, with a parameter among the inputs.
    h = Checkpointed(
        [this](const Tensor& x, const Tensor& bias) {
          const Tensor y = Checkpointed(
              [this](const Tensor& z) { return Counted(2, z); }, x + bias);
          return torch::tanh(Block(1, y));
        },
        h, in_->bias);
    return MseLoss(out_(h), inputs.Target({5, 3}));
  }

 private:
  Tensor Counted(size_t i, const Tensor& x) {
    calls_ += 1;
    return Block(i, torch::dropout(x, 0.2, /*train=*/true)) *
           (1 + 0.01 * calls_).to(x.dtype());
  }
  Tensor calls_;
};

class GradientPenalty : public Blocks {
 public:
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(*this, rank, micro_batch);
    const Tensor x = inputs.Normal({5, 7}).requires_grad_(true);
    const Tensor out = Forward(x, Whole());
    const Tensor fit = MseLoss(out, inputs.Target({5, 3}));
    const auto slopes = torch::autograd::grad({out.sum(), fit}, {x}, {}, true,
                                              /*create_graph=*/true);
    const auto of_weight = torch::autograd::grad({fit}, {in_->weight}, {}, true,
                                                 /*create_graph=*/true);
    return fit + 0.1 * slopes[0].to(torch::kFloat).square().mean() +
           0.1 * of_weight[0].to(torch::kFloat).abs().mean();
  }
};

// The model evaluates a shorter path before every other micro-batch, and the
// result weighs the loss.
class Evaluating : public Blocks {
 public:
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(*this, rank, micro_batch);
    Tensor score = torch::zeros({});
    if (micro_batch % 2 == 1) {
      torch::NoGradGuard no_grad;
      eval();
      for (int i = 0; i < 3; ++i) {
        score += Forward(inputs.Normal({2, 7}), {0, 2}).square().mean();
      }
      train();
    }
    const Tensor out = Forward(inputs.Normal({5, 7}), Whole());
    return MseLoss(out, inputs.Target({5, 3})) * (1 + 0.1 * score);
  }
};

class ChangingPath : public Blocks {
 public:
  Tensor Loss(int rank, int64_t micro_batch) override {
    static const std::vector<std::vector<size_t>> paths = {
        {0, 1, 2}, {2, 0}, {1, 1, 1}, {0, 1, 2}, {}, {2, 1, 0, 2}};
    Inputs inputs(*this, rank, micro_batch);
    const auto& path = paths[static_cast<size_t>(micro_batch) % paths.size()];
    return MseLoss(Forward(inputs.Normal({5, 7}), path), inputs.Target({5, 3}));
  }
};

// Every rank and micro-batch takes a path of its own, of another length.
class Wandering : public Blocks {
 public:
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(*this, rank, micro_batch);
    std::mt19937 random(static_cast<unsigned>(1000 * micro_batch + rank));
    std::vector<size_t> path(random() % 6);
    for (size_t& block : path) block = random() % 3;
    return MseLoss(Forward(inputs.Normal({5, 7}), path), inputs.Target({5, 3}));
  }
};

}  // namespace

ModelMakers LoopModels() {
  return {
      {"Recomputing", MakeModel<Recomputing>},
      {"Checkpointing", MakeModel<Checkpointing>},
      {"GradientPenalty", MakeModel<GradientPenalty>},
      {"Evaluating", MakeModel<Evaluating>},
      {"ChangingPath", MakeModel<ChangingPath>},
      {"Wandering", MakeModel<Wandering>},
  };
}

}  // namespace tessera
