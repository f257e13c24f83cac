// Test models: architectures of the field, small.
#include <torch/torch.h>

#include <tuple>
#include <vector>

#include "nn/linear_cross_entropy.h"
#include "tests/models/models_internal.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using at::Tensor;

nn::Conv2d Conv(int64_t in, int64_t out, int64_t kernel, int64_t stride = 1) {
  return nn::Conv2d(
      nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2));
}

// ---- Resnet

struct ResidualImpl : nn::Module {
  ResidualImpl(int64_t in, int64_t out, int64_t stride)
      : conv1(register_module("conv1", Conv(in, out, 3, stride))),
        norm1(register_module("norm1", nn::BatchNorm2d(out))),
        conv2(register_module("conv2", Conv(out, out, 3))),
        norm2(register_module("norm2", nn::BatchNorm2d(out))) {
    if (in == out && stride == 1) return;
    shortcut = register_module("shortcut", Conv(in, out, 1, stride));
  }
  Tensor forward(const Tensor& x) {
    const Tensor h = norm2(conv2(torch::relu(norm1(conv1(x)))));
    return torch::relu(h + (shortcut.is_empty() ? x : shortcut(x)));
  }
  nn::Conv2d conv1;
  nn::BatchNorm2d norm1;
  nn::Conv2d conv2;
  nn::BatchNorm2d norm2;
  nn::Conv2d shortcut{nullptr};
};
TORCH_MODULE(Residual);

class Resnet : public TestModel {
 public:
  Resnet() {
    stem_ = register_module("stem", Conv(3, 5, 3));
    const int64_t widths[] = {5, 5, 9, 13};
    for (int i = 0; i < 3; ++i) {
      layers_->push_back(Residual(widths[i], widths[i + 1],
                                  widths[i] == widths[i + 1] ? 1 : 2));
    }
    register_module("layers", layers_);
    head_ = register_module("head", nn::Linear(13, 4));
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(*this, rank, micro_batch);
    Tensor h = torch::relu(stem_(inputs.Normal({4, 3, 10, 10})));
    h = torch::max_pool2d(h, 2);
    for (const auto& layer : *layers_) h = layer->as<Residual>()->forward(h);
    h = torch::adaptive_avg_pool2d(h, {1, 1}).flatten(1);
    return CrossEntropy(head_(h), inputs.Tokens(4, {4}));
  }

 private:
  nn::Conv2d stem_{nullptr};
  nn::ModuleList layers_;
  nn::Linear head_{nullptr};
};

// ---- Seq2Seq: an encoder-decoder that translates

class Seq2Seq : public TestModel {
 public:
  Seq2Seq() {
    source_ = register_module("source", nn::Embedding(19, kDim));
    target_ = register_module("target", nn::Embedding(23, kDim));
    transformer_ = register_module(
        "transformer", nn::Transformer(nn::TransformerOptions(kDim, 3)
                                           .num_encoder_layers(2)
                                           .num_decoder_layers(2)
                                           .dim_feedforward(17)
                                           .dropout(0.1)));
    head_ = register_module("head", nn::Linear(kDim, 23));
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(*this, rank, micro_batch);
    const Tensor in = source_(inputs.Tokens(19, {7, 3}));
    const Tensor words = inputs.Tokens(23, {6, 3});
    const Tensor mask =
        nn::TransformerImpl::generate_square_subsequent_mask(5).to(in.dtype());
    const Tensor h = transformer_(in, target_(words.narrow(0, 0, 5)),
                                  /*src_mask=*/Tensor(), mask);
    return CrossEntropy(head_(h).flatten(0, 1),
                        words.narrow(0, 1, 5).flatten());
  }

 private:
  static constexpr int64_t kDim = 15;
  nn::Embedding source_{nullptr}, target_{nullptr};
  nn::Transformer transformer_{nullptr};
  nn::Linear head_{nullptr};
};

// ---- Experts: which of them a rank runs is its own affair

class Experts : public TestModel {
 public:
  Experts() {
    router_ = register_module("router", nn::Linear(9, kExperts));
    for (int64_t i = 0; i < kExperts; ++i) {
      experts_->push_back(
          nn::Sequential(nn::Linear(9, 21), nn::GELU(), nn::Linear(21, 9)));
    }
    register_module("experts", experts_);
    head_ = register_module("head", nn::Linear(9, 3));
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(*this, rank, micro_batch);
    const Tensor x = inputs.Normal({4, 9});
    const Tensor weights = torch::softmax(router_(x), -1);
    const Tensor chosen = std::get<1>(weights.max(-1));
    Tensor h = torch::zeros_like(x);
    for (int64_t e = 0; e < kExperts; ++e) {
      const Tensor rows = (chosen == e).nonzero().flatten();
      if (rows.numel() == 0) continue;  // this rank has nothing for it
      const Tensor out =
          experts_[static_cast<size_t>(e)]->as<nn::Sequential>()->forward(
              x.index_select(0, rows));
      const Tensor weight = weights.index_select(0, rows).narrow(1, e, 1);
      h = h.index_add(0, rows, out * weight);
    }
    return MseLoss(head_(h), inputs.Target({4, 3}));
  }

 private:
  static constexpr int64_t kExperts = 5;
  nn::Linear router_{nullptr};
  nn::ModuleList experts_;
  nn::Linear head_{nullptr};
};

// ---- Unet: what goes down comes back up beside what was kept

class Unet : public TestModel {
 public:
  Unet() {
    down1_ = register_module("down1", Conv(2, 5, 3));
    down2_ = register_module("down2", Conv(5, 7, 3, 2));
    middle_ = register_module("middle", Conv(7, 11, 3, 2));
    norm_ = register_module("norm", nn::GroupNorm(nn::GroupNormOptions(1, 11)));
    up2_ = register_module("up2", Conv(18, 7, 3));
    up1_ = register_module("up1", Conv(12, 5, 3));
    out_ = register_module("out", Conv(5, 2, 1));
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(*this, rank, micro_batch);
    const Tensor a = torch::silu(down1_(inputs.Normal({2, 2, 8, 8})));
    const Tensor b = torch::silu(down2_(a));
    const Tensor c = torch::silu(norm_(middle_(b)));
    const Tensor d = torch::silu(up2_(torch::cat({Wider(c), b}, 1)));
    const Tensor e = torch::silu(up1_(torch::cat({Wider(d), a}, 1)));
    return MseLoss(out_(e), inputs.Target({2, 2, 8, 8}));
  }

 private:
  static Tensor Wider(const Tensor& x) {
    return torch::upsample_nearest2d(x, {2 * x.size(2), 2 * x.size(3)});
  }
  nn::Conv2d down1_{nullptr}, down2_{nullptr}, middle_{nullptr};
  nn::GroupNorm norm_{nullptr};
  nn::Conv2d up2_{nullptr}, up1_{nullptr}, out_{nullptr};
};

// ---- Lora: low-rank additions to frozen layers

struct LoraLinearImpl : nn::Module {
  LoraLinearImpl(int64_t in, int64_t out, int64_t rank)
      : base(register_module("base", nn::Linear(in, out))),
        a(register_parameter("a", 0.3 * torch::randn({rank, in}))),
        b(register_parameter("b", torch::zeros({out, rank}))) {
    for (Tensor& p : base->parameters()) p.requires_grad_(false);
  }
  Tensor forward(const Tensor& x) {
    return base(x) + 0.5 * torch::linear(torch::linear(x, a), b);
  }
  nn::Linear base;
  Tensor a, b;
};
TORCH_MODULE(LoraLinear);

class Lora : public TestModel {
 public:
  Lora() {
    for (int i = 0; i < 3; ++i) layers_->push_back(LoraLinear(11, 11, 2));
    register_module("layers", layers_);
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(*this, rank, micro_batch);
    Tensor h = inputs.Normal({5, 11});
    for (const auto& layer : *layers_) {
      h = torch::tanh(layer->as<LoraLinear>()->forward(h));
    }
    return MseLoss(h, inputs.Target({5, 11}));
  }

 private:
  nn::ModuleList layers_;
};

// ---- PackedGru: sequences of unequal length

class PackedGru : public TestModel {
 public:
  PackedGru() {
    gru_ = register_module(
        "gru", nn::GRU(nn::GRUOptions(5, 7).num_layers(2).bidirectional(true)));
    head_ = register_module("head", nn::Linear(14, 3));
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    namespace rnn = nn::utils::rnn;
    Inputs inputs(*this, rank, micro_batch);
    const Tensor x = inputs.Normal({6, 4, 5});
    const auto packed =
        rnn::pack_padded_sequence(x, torch::tensor({6, 4, 3, 1}, torch::kLong));
    const auto out = std::get<0>(gru_->forward_with_packed_input(packed));
    const Tensor h = std::get<0>(rnn::pad_packed_sequence(out));
    return MseLoss(head_(h), inputs.Target({6, 4, 3}));
  }

 private:
  nn::GRU gru_{nullptr};
  nn::Linear head_{nullptr};
};

// ---- Vit: patches of an image, a class token, positions

class Vit : public TestModel {
 public:
  Vit() {
    patch_ = register_module(
        "patch", nn::Conv2d(nn::Conv2dOptions(3, kDim, 4).stride(4)));
    token_ = register_parameter("token", 0.1 * torch::randn({1, 1, kDim}));
    position_ =
        register_parameter("position", 0.1 * torch::randn({1, 5, kDim}));
    for (int i = 0; i < 2; ++i) {
      layers_->push_back(nn::TransformerEncoderLayer(
          nn::TransformerEncoderLayerOptions(kDim, 3).dim_feedforward(19)));
    }
    register_module("layers", layers_);
    head_ = register_module("head", nn::Linear(kDim, 4));
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(*this, rank, micro_batch);
    const Tensor patches =
        patch_(inputs.Normal({3, 3, 8, 8})).flatten(2).transpose(1, 2);
    Tensor h = torch::cat({token_.expand({3, 1, kDim}), patches}, 1);
    h = (h + position_).transpose(0, 1);
    for (const auto& layer : *layers_) {
      h = layer->as<nn::TransformerEncoderLayer>()->forward(h);
    }
    return CrossEntropy(head_(h.select(0, 0)), inputs.Tokens(4, {3}));
  }

 private:
  static constexpr int64_t kDim = 15;
  nn::Conv2d patch_{nullptr};
  Tensor token_, position_;
  nn::ModuleList layers_;
  nn::Linear head_{nullptr};
};

// ---- GraphNet: neighbours are summed by a sparse matrix

class GraphNet : public TestModel {
 public:
  GraphNet() {
    in_ = register_module("in", nn::Linear(6, 11));
    out_ = register_module("out", nn::Linear(11, 3));
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(*this, rank, micro_batch);
    const Tensor edges = inputs.Tokens(kNodes, {2, 20});
    const Tensor graph =
        torch::sparse_coo_tensor(edges, torch::ones({20}) / 4, {kNodes, kNodes})
            .coalesce();
    Tensor h = torch::relu(torch::mm(graph, in_(inputs.Normal({kNodes, 6}))));
    return MseLoss(torch::mm(graph, out_(h)), inputs.Target({kNodes, 3}));
  }

 private:
  static constexpr int64_t kNodes = 8;
  nn::Linear in_{nullptr}, out_{nullptr};
};

// ---- Autoencoder: transposed convolutions

class Autoencoder : public TestModel {
 public:
  Autoencoder() {
    encode1_ = register_module("encode1", Conv(1, 5, 3, 2));
    encode2_ = register_module("encode2", Conv(5, 9, 3, 2));
    decode2_ = register_module(
        "decode2",
        nn::ConvTranspose2d(
            nn::ConvTranspose2dOptions(9, 5, 4).stride(2).padding(1)));
    decode1_ = register_module(
        "decode1",
        nn::ConvTranspose2d(
            nn::ConvTranspose2dOptions(5, 1, 4).stride(2).padding(1)));
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(*this, rank, micro_batch);
    const Tensor x = inputs.Normal({3, 1, 8, 8});
    const Tensor code = torch::relu(encode2_(torch::relu(encode1_(x))));
    return MseLoss(decode1_(torch::relu(decode2_(code))), x);
  }

 private:
  nn::Conv2d encode1_{nullptr}, encode2_{nullptr};
  nn::ConvTranspose2d decode2_{nullptr}, decode1_{nullptr};
};

// ---- ChunkedLoss: tokens whose logits are computed in chunks, other numbers
// of them on each rank; with the embedding's weight, and with a head's and its
// bias

class ChunkedLoss : public TestModel {
 public:
  ChunkedLoss() {
    tokens_ = register_module("tokens", nn::Embedding(kWords, kDim));
    for (int i = 0; i < 2; ++i) layers_->push_back(nn::Linear(kDim, kDim));
    register_module("layers", layers_);
    head_ = register_module("head", nn::Linear(kDim, kWords));
  }
  Tensor Loss(int rank, int64_t micro_batch) override {
    Inputs inputs(*this, rank, micro_batch);
    const int64_t samples = rank == 0 ? 1 : 3;
    Tensor h = tokens_(inputs.Tokens(kWords, {samples, 5}));
    for (const auto& layer : *layers_) {
      h = h + torch::tanh(layer->as<nn::Linear>()->forward(h));
    }
    const Tensor words = inputs.Tokens(kWords, {samples, 5});
    LinearCrossEntropyOptions options;
    options.chunk = 5;
    const Tensor tied = LinearCrossEntropy(h, tokens_->weight, words, options);
    options.bias = head_->bias;
    options.ignore_index = 2;
    options.label_smoothing = 0.1;
    return 0.5 * tied + LinearCrossEntropy(h, head_->weight, words, options);
  }

 private:
  static constexpr int64_t kWords = 19, kDim = 11;
  nn::Embedding tokens_{nullptr};
  nn::ModuleList layers_;
  nn::Linear head_{nullptr};
};

}  // namespace

ModelMakers ZooModels() {
  return {
      {"ChunkedLoss", MakeModel<ChunkedLoss>},
      {"Resnet", MakeModel<Resnet>},
      {"Seq2Seq", MakeModel<Seq2Seq>},
      {"Experts", MakeModel<Experts>},
      {"Unet", MakeModel<Unet>},
      {"Lora", MakeModel<Lora>},
      {"PackedGru", MakeModel<PackedGru>},
      {"Vit", MakeModel<Vit>},
      {"GraphNet", MakeModel<GraphNet>},
      {"Autoencoder", MakeModel<Autoencoder>},
  };
}

}  // namespace tessera
