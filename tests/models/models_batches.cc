// Test models: ranks and steps that differ.
#include <torch/torch.h>

#include "tests/models/models_internal.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using at::Tensor;

// ---- Ranks that differ

class OneRank : public TestModel {
 public:
  OneRank() {
    common_ = register_module("common", nn::Linear(8, 9));
    own_ = register_module("own", nn::Linear(8, 9));
    head_ = register_module("head", nn::Linear(9, 3));
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(*this, rank, micro_batch);
    Tensor x = inputs.Normal({4, 8});
    Tensor h = torch::tanh(common_(x));
    Tensor own = own_(x);
    Tensor loss = MseLoss(head_(h), inputs.Target({4, 3}));
    return rank == 1 ? loss + own.to(torch::kFloat).square().mean() : loss;
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
    Inputs inputs(*this, rank, micro_batch);
    Tensor x = inputs.Normal({4, 8});
    Tensor h = torch::tanh(common_(x));
    Tensor own = own_(x), late = late_(x);
    Tensor loss = MseLoss(head_(h), inputs.Target({4, 3}));
    if (micro_batch % 4 == rank)
      loss = loss + own.to(torch::kFloat).square().mean();
    if (micro_batch > 1 && rank == 0)
      loss = loss + late.to(torch::kFloat).abs().mean();
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
    Inputs inputs(*this, rank, micro_batch);
    Tensor h = torch::tanh(common_(inputs.Normal({4, 8})));
    if (rank == 1) h = own_(h);
    return MseLoss(head_(h), inputs.Target({4, 3}));
  }

 private:
  nn::Linear common_{nullptr}, own_{nullptr}, head_{nullptr};
};

// ---- Steps that differ

// Far above a gradient norm of 1 at even micro-batches, far below at odd ones.
class LargeNorm : public TestModel {
 public:
  LargeNorm() {
    in_ = register_module("in", nn::Linear(9, 21));
    out_ = register_module("out", nn::Linear(21, 4));
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(*this, rank, micro_batch);
    Tensor h = out_(torch::tanh(in_(inputs.Normal({4, 9}))));
    return MseLoss(h, inputs.Target({4, 4})) *
           (micro_batch % 2 == 0 ? 128 : 1.0 / 128);
  }

 private:
  nn::Linear in_{nullptr}, out_{nullptr};
};

// At micro-batch 1 of rank 0 the loss overflows, and with it everything; at 4
// and 5 of rank 1 one element of a gradient does, which only one rank may own.
class Overflows : public TestModel {
 public:
  Overflows() {
    in_ = register_module("in", nn::Linear(9, 14));
    out_ = register_module("out", nn::Linear(14, 4));
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(*this, rank, micro_batch);
    Tensor h = out_(torch::tanh(in_(inputs.Normal({4, 9}))));
    constexpr double kLarge = 1e6;  // float16 ends at 65504
    if (rank == 0 && micro_batch == 1) h = h * kLarge;
    const double one = rank == 1 && micro_batch / 2 == 2 ? kLarge : 0;
    return MseLoss(h, inputs.Target({4, 4})) +
           out_->bias.select(0, 0).to(torch::kFloat) * one;
  }

 private:
  nn::Linear in_{nullptr}, out_{nullptr};
};

}  // namespace

ModelMakers BatchModels() {
  return {
      {"OneRank", MakeModel<OneRank>},
      {"ChangingRank", MakeModel<ChangingRank>},
      {"OneRankForward", MakeModel<OneRankForward>},
      {"LargeNorm", MakeModel<LargeNorm>},
      {"Overflows", MakeModel<Overflows>},
  };
}

}  // namespace tessera
