// Test models: ways of reaching a parameter, and kinds of parameters.
#include <torch/torch.h>

#include "tests/models/models_internal.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using at::Tensor;

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
    Inputs inputs(*this, rank, micro_batch);
    Tensor x = inputs.Normal({4, kDim});
    auto w = qkv_.chunk(3, 0);
    Tensor h = torch::matmul(x, w[0].t()) * torch::linear(x, w[1]);
    h = h + torch::addmm(bias_.select(1, 1), x, w[2].transpose(0, 1));
    h = h + table_.view({4, kDim});
    h = h * table_.slice(0, 3, 3 + kDim) + scale_.expand({4, kDim});
    h = h + table_.index({inputs.Tokens(kDim * 4, {4, kDim})});
    h = h + bias_.unbind(1)[2] * bias_.permute({1, 0}).narrow(0, 0, 1);
    return MseLoss(h, inputs.Target({4, kDim}));
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
    Inputs inputs(*this, rank, micro_batch);
    Tensor h =
        torch::tanh(torch::linear(inputs.Normal({4, 13}), weight_, bias_));
    return MseLoss(torch::linear(h, head_), inputs.Target({4, 9}));
  }

 private:
  Tensor weight_, bias_, head_;
};

// The transpose of a linear layer with its weight, under a name of its own.
struct TiedDecoderImpl : nn::Module {
  explicit TiedDecoderImpl(const Tensor& of)
      : weight(register_parameter("weight", of)),
        bias(register_parameter("bias", torch::zeros({of.size(1)}))) {}
  Tensor forward(const Tensor& x) { return torch::linear(x, weight.t(), bias); }
  Tensor weight, bias;
};
TORCH_MODULE(TiedDecoder);

class Tied : public TestModel {
 public:
  Tied() {
    encoder_ = register_module("encoder", nn::Linear(11, 7));
    middle_ = register_module("middle", nn::Linear(7, 7));
    decoder_ = register_module("decoder", TiedDecoder(encoder_->weight));
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(*this, rank, micro_batch);
    Tensor h = torch::tanh(encoder_(inputs.Normal({5, 11})));
    return MseLoss(decoder_(torch::tanh(middle_(h))), inputs.Target({5, 11}));
  }

 private:
  nn::Linear encoder_{nullptr}, middle_{nullptr};
  TiedDecoder decoder_{nullptr};
};

class Clamped : public TestModel {
 public:
  Clamped() {
    up_ = register_module("up", nn::Linear(9, 13));
    down_ = register_module("down", nn::Linear(13, 5));
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    {
      torch::NoGradGuard no_grad;
      for (Tensor& p : parameters()) p.clamp_(-8, 8);  // all are within
    }
    Inputs inputs(*this, rank, micro_batch);
    return MseLoss(down_(torch::tanh(up_(inputs.Normal({4, 9})))),
                   inputs.Target({4, 5}));
  }

 private:
  nn::Linear up_{nullptr}, down_{nullptr};
};

class UsedTwice : public TestModel {
 public:
  UsedTwice() {
    first_ = register_module("first", nn::Linear(9, 9));
    again_ = register_module("again", nn::Linear(9, 9));
    last_ = register_module("last", nn::Linear(9, 9));
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(*this, rank, micro_batch);
    Tensor h = again_(torch::relu(first_(inputs.Normal({5, 9}))));
    h = again_(torch::tanh(h));
    return MseLoss(last_(h), inputs.Target({5, 9}));
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
    Inputs inputs(*this, rank, micro_batch);
    Tensor x = table_(inputs.Tokens(17, {8})) + inputs.Normal({8, 10});
    Tensor h = In(norm_, torch::tanh(frozen_(x)));
    return CrossEntropy(In(head_, h), inputs.Tokens(17, {8}));
  }

 private:
  const bool thaw_;
  nn::Embedding table_{nullptr};
  nn::Linear frozen_{nullptr}, head_{nullptr};
  nn::LayerNorm norm_{nullptr};
};

// Tensors that were made without a gradient and registered so, integers too.
class NeverTrained : public TestModel {
 public:
  NeverTrained() {
    in_ = register_module("in", nn::Linear(10, 12));
    list_ = register_module("list", nn::ParameterList());
    list_->append(torch::randn({12}));
    dict_ = register_module("dict", nn::ParameterDict());
    dict_->insert("shift", torch::randn({12}));
    register_parameter("mix", torch::randn({12, 12}), /*requires_grad=*/false);
    register_parameter("order", torch::randperm(12), /*requires_grad=*/false);
    register_parameter("mask", torch::rand({12}) < 0.3,
                       /*requires_grad=*/false);
    out_ = register_module("out", nn::Linear(12, 5));
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    auto own = named_parameters(/*recurse=*/false);
    Inputs inputs(*this, rank, micro_batch);
    Tensor h = torch::tanh(In(in_, inputs.Normal({4, 10})));
    h = h.index_select(1, own["order"]) * list_->parameters()[0];
    h = torch::matmul(h, own["mix"]) + dict_->get("shift");
    h = h.masked_fill(own["mask"], 0.5);
    return MseLoss(out_(h), inputs.Target({4, 5}));
  }

 private:
  nn::Linear in_{nullptr}, out_{nullptr};
  nn::ParameterList list_{nullptr};
  nn::ParameterDict dict_{nullptr};
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
    Inputs inputs(*this, rank, micro_batch);
    // Few words, so that the padding row and repeated rows occur.
    Tensor words = inputs.Tokens(5, {6, 4});
    Tensor h =
        table_(words).mean(1) + bag_(words) + table_(inputs.Tokens(19, {6}));
    return CrossEntropy(head_(h), inputs.Tokens(19, {6}));
  }

 private:
  nn::Embedding table_{nullptr};
  nn::EmbeddingBag bag_{nullptr};
  nn::Linear head_{nullptr};
};

// Two, one after the other, and a third that makes the target.
class TwoForwards : public TestModel {
 public:
  TwoForwards() {
    up_ = register_module("up", nn::Linear(8, 13));
    down_ = register_module("down", nn::Linear(13, 5));
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(*this, rank, micro_batch);
    const Tensor first = Forward(inputs.Normal({4, 8}));
    const Tensor second = Forward(inputs.Normal({4, 8}));
    Tensor target;
    {
      torch::NoGradGuard no_grad;
      target = Forward(inputs.Normal({4, 8})).to(torch::kFloat);
    }
    return MseLoss(first, inputs.Target({4, 5})) + MseLoss(second, target);
  }

 private:
  Tensor Forward(const Tensor& x) { return down_(torch::tanh(up_(x))); }
  nn::Linear up_{nullptr}, down_{nullptr};
};

class SparseEmbedding : public TestModel {
 public:
  SparseEmbedding() {
    table_ = register_module(
        "table", nn::Embedding(nn::EmbeddingOptions(23, 7).sparse(true)));
    head_ = register_module("head", nn::Linear(7, 19));
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(*this, rank, micro_batch);
    // Few words, so that rows occur repeatedly, and some never.
    Tensor h = table_(inputs.Tokens(5, {6, 4})).mean(1);
    return CrossEntropy(head_(h), inputs.Tokens(19, {6}));
  }

 private:
  nn::Embedding table_{nullptr};
  nn::Linear head_{nullptr};
};

// ---- Dtypes

class MixedDtype : public TestModel {
 public:
  MixedDtype() {
    first_ = register_module("first", nn::Linear(7, 9));
    scale_ = register_parameter("scale", torch::randn({9, 5}, torch::kDouble));
    shift_ = register_parameter("shift", torch::randn({5}, torch::kDouble));
    last_ = register_module("last", nn::Linear(5, 3));
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(*this, rank, micro_batch);
    Tensor h = torch::tanh(In(first_, inputs.Normal({4, 7})));
    h = torch::addmm(shift_, h.to(scale_.dtype()), scale_);
    return MseLoss(In(last_, h), inputs.Target({4, 3}));
  }

 private:
  nn::Linear first_{nullptr}, last_{nullptr};
  Tensor scale_, shift_;
};

class Complex : public TestModel {
 public:
  Complex() {
    in_ = register_module("in", nn::Linear(6, 10));
    filter_ = register_parameter("filter",
                                 torch::randn({5, 7}, torch::kComplexFloat));
    phase_ =
        register_parameter("phase", torch::randn({7}, torch::kComplexFloat));
    out_ = register_module("out", nn::Linear(14, 3));
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(*this, rank, micro_batch);
    Tensor h = in_(inputs.Normal({4, 6})).to(torch::kFloat);
    Tensor z = torch::view_as_complex(h.view({4, 5, 2}));
    z = torch::matmul(z, filter_) * phase_;
    return MseLoss(In(out_, torch::view_as_real(z).flatten(1)),
                   inputs.Target({4, 3}));
  }

 private:
  nn::Linear in_{nullptr}, out_{nullptr};
  Tensor filter_, phase_;
};

}  // namespace

ModelMakers ParameterModels() {
  return {
      {"Views", MakeModel<Views>},
      {"SharedStorage", MakeModel<SharedStorage>},
      {"Tied", MakeModel<Tied>},
      {"Clamped", MakeModel<Clamped>},
      {"UsedTwice", MakeModel<UsedTwice>},
      {"TwoForwards", MakeModel<TwoForwards>},
      {"Frozen", [] { return std::make_shared<Frozen>(false); }},
      {"Thawed", [] { return std::make_shared<Frozen>(true); }},
      {"NeverTrained", MakeModel<NeverTrained>},
      {"Embedding", MakeModel<Embedding>},
      {"SparseEmbedding", MakeModel<SparseEmbedding>},
      {"MixedDtype", MakeModel<MixedDtype>},
      {"Complex", MakeModel<Complex>},
  };
}

}  // namespace tessera
