// Variants that are whole networks.
#include <torch/torch.h>

#include <tuple>

#include "absl/strings/str_cat.h"
#include "tests/zoo/rig.h"

namespace tessera::zoo {
namespace {

nn::Sequential Mlp(int64_t in, int64_t hidden, int64_t out) {
  return nn::Sequential(nn::Linear(in, hidden), nn::GELU(),
                        nn::Linear(hidden, hidden), nn::Tanh(),
                        nn::Linear(hidden, out));
}

Tensor Classes(const Tensor& logits, const Tensor& targets) {
  return torch::cross_entropy_loss(logits, targets);
}

// ---- attention

ZOO_VARIANT(Transformer) {
  nn::TransformerEncoder net(
      nn::TransformerEncoderOptions(
          nn::TransformerEncoderLayerOptions(12, 3).dim_feedforward(17), 2)
          .norm(nn::AnyModule(nn::LayerNorm(nn::LayerNormOptions({12})))));
  rig.TrainOn(net.ptr(), [&] {
    return torch::mse_loss(net(rig.Randn({5, 3, 12})), rig.Randn({5, 3, 12}));
  });
}

ZOO_VARIANT(EncoderDecoder) {
  nn::Transformer net(nn::TransformerOptions(12, 3)
                          .num_encoder_layers(1)
                          .num_decoder_layers(2)
                          .dim_feedforward(13)
                          .activation(torch::kGELU));
  rig.TrainOn(net.ptr(), [&] {
    const Tensor mask = nn::TransformerImpl::generate_square_subsequent_mask(4);
    const Tensor out =
        net(rig.Randn({6, 2, 12}), rig.Randn({4, 2, 12}), Tensor(), mask);
    return torch::l1_loss(out, rig.Randn({4, 2, 12}));
  });
}

ZOO_VARIANT(AttentionWithBiasKvKdimVdim) {
  nn::MultiheadAttention net(nn::MultiheadAttentionOptions(12, 4)
                                 .add_bias_kv(true)
                                 .add_zero_attn(true)
                                 .kdim(7)
                                 .vdim(7)
                                 .dropout(0.2));
  rig.TrainOn(net.ptr(), [&] {
    const auto [out, weights] =
        net(rig.Randn({4, 2, 12}), rig.Randn({6, 2, 7}), rig.Randn({6, 2, 7}));
    return out.pow(2).mean() + weights.var();
  });
}

struct CausalLm : nn::Module {
  CausalLm() {
    words = register_module("words", nn::Embedding(23, 10));
    query = register_module("query", nn::Linear(10, 30));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({10})));
  }
  Tensor forward(const Tensor& tokens) {
    const Tensor h = norm(words(tokens));
    const auto qkv = query(h).chunk(3, -1);
    const Tensor mixed = torch::scaled_dot_product_attention(
        qkv[0], qkv[1], qkv[2], {}, /*dropout_p=*/0.0, /*is_causal=*/true);
    return torch::matmul(h + mixed, words->weight.t());  // tied
  }
  nn::Embedding words{nullptr};
  nn::Linear query{nullptr};
  nn::LayerNorm norm{nullptr};
};

ZOO_VARIANT(CausalLanguageModelWithTiedHead) {
  auto net = std::make_shared<CausalLm>();
  rig.TrainOn(net, [&] {
    const Tensor tokens = rig.Tokens(23, {3, 8});
    const Tensor logits = net->forward(tokens.narrow(1, 0, 7));
    return Classes(logits.flatten(0, 1), tokens.narrow(1, 1, 7).flatten());
  });
}

// ---- recurrence

ZOO_VARIANT(PackedGru) {
  nn::GRU net(nn::GRUOptions(5, 7).num_layers(2).bidirectional(true));
  rig.TrainOn(net.ptr(), [&] {
    namespace rnn = nn::utils::rnn;
    const auto packed = rnn::pack_padded_sequence(
        rig.Randn({6, 4, 5}), torch::tensor({6, 4, 3, 1}, torch::kLong));
    const auto out = std::get<0>(net->forward_with_packed_input(packed));
    return std::get<0>(rnn::pad_packed_sequence(out)).pow(2).mean();
  });
}

ZOO_VARIANT(LstmWithProjection) {
  nn::LSTM net(nn::LSTMOptions(5, 9).num_layers(2).dropout(0.3).proj_size(4));
  rig.TrainOn(net.ptr(), [&] {
    const auto [out, state] = net(rig.Randn({6, 3, 5}));
    return out.abs().mean() + std::get<1>(state).sum();
  });
}

ZOO_VARIANT(RecurrenceByHand) {
  nn::GRUCell cell(nn::GRUCellOptions(3, 8));
  rig.TrainOn(cell.ptr(), [&] {
    Tensor h = torch::zeros({2, 8});
    for (int t = 0; t < 5 + rig.rank(); ++t) h = cell(rig.Randn({2, 3}), h);
    return h.pow(2).sum();
  });
}

// Each window begins with the last one's state, detached.
ZOO_VARIANT(TruncatedBackpropagation) {
  nn::RNN net(nn::RNNOptions(3, 6).num_layers(2));
  Tensor state;
  rig.TrainOn(net.ptr(), [&] {
    const auto [out, next] = net(rig.Randn({4, 2, 3}), state);
    state = next.detach();
    return torch::mse_loss(out, rig.Randn({4, 2, 6}));
  });
}

// ---- images

nn::Conv2d Conv(int64_t in, int64_t out, int64_t stride = 1) {
  return nn::Conv2d(nn::Conv2dOptions(in, out, 3).stride(stride).padding(1));
}

struct UNetNet : nn::Module {
  UNetNet() {
    down = register_module("down", Conv(2, 5));
    middle = register_module("middle", Conv(5, 7, 2));
    up = register_module(
        "up",
        nn::ConvTranspose2d(nn::ConvTranspose2dOptions(7, 5, 2).stride(2)));
    out = register_module("out", Conv(10, 2));
  }
  Tensor forward(const Tensor& x) {
    const Tensor a = torch::silu(down(x));
    const Tensor b = torch::silu(up(torch::silu(middle(a))));
    return out(torch::cat({a, b}, 1));
  }
  nn::Conv2d down{nullptr}, middle{nullptr}, out{nullptr};
  nn::ConvTranspose2d up{nullptr};
};

ZOO_VARIANT(UNet) {
  auto net = std::make_shared<UNetNet>();
  rig.TrainOn(net, [&] {
    return torch::mse_loss(net->forward(rig.Randn({2, 2, 8, 8})),
                           rig.Randn({2, 2, 8, 8}));
  });
}

ZOO_VARIANT(ConvolutionsOfOneTwoAndThreeDimensions) {
  auto net = std::make_shared<nn::Module>();
  nn::Conv1d one = net->register_module("one", nn::Conv1d(3, 5, 3));
  nn::ConvTranspose1d back =
      net->register_module("back", nn::ConvTranspose1d(5, 3, 3));
  nn::Conv3d three = net->register_module("three", nn::Conv3d(2, 3, 2));
  nn::Conv2d deep = net->register_module(
      "deep", nn::Conv2d(nn::Conv2dOptions(6, 12, 3).groups(6).dilation(2)));
  rig.TrainOn(net, [&] {
    const Tensor a = back(torch::relu(one(rig.Randn({2, 3, 9}))));
    const Tensor b = three(rig.Randn({2, 2, 4, 4, 4}));
    const Tensor c = deep(
        rig.Randn({2, 6, 7, 7}).contiguous(at::MemoryFormat::ChannelsLast));
    return a.pow(2).mean() + b.pow(2).mean() + c.abs().mean();
  });
}

struct Block : nn::Module {
  Block() {
    conv = register_module("conv", Conv(4, 4));
    norm = register_module("norm", nn::BatchNorm2d(4));
  }
  Tensor forward(const Tensor& x) { return torch::relu(norm(conv(x)) + x); }
  nn::Conv2d conv{nullptr};
  nn::BatchNorm2d norm{nullptr};
};

ZOO_VARIANT(ResidualsWithBatchNorm) {
  auto net = std::make_shared<nn::Module>();
  std::vector<std::shared_ptr<Block>> blocks;
  for (int i = 0; i < 3; ++i) {
    blocks.push_back(net->register_module(absl::StrCat("block", i),
                                          std::make_shared<Block>()));
  }
  rig.TrainOn(net, [&] {
    Tensor h = rig.Randn({3, 4, 6, 6});
    for (const auto& block : blocks) h = block->forward(h);
    return torch::adaptive_avg_pool2d(h, {1, 1}).pow(2).mean();
  });
}

ZOO_VARIANT(SpatialTransformer) {
  nn::Sequential where(nn::Flatten(), nn::Linear(36, 6));
  rig.TrainOn(where.ptr(), [&] {
    const Tensor image = rig.Randn({2, 1, 6, 6});
    const Tensor theta = where->forward(image).view({2, 2, 3});
    const Tensor grid =
        torch::affine_grid_generator(theta, {2, 1, 6, 6}, false);
    return torch::grid_sampler(image, grid, 0, 0, false).pow(2).mean();
  });
}

// ---- networks of networks

ZOO_VARIANT(Siamese) {
  nn::Sequential net = Mlp(6, 9, 5);
  rig.TrainOn(net.ptr(), [&] {
    const Tensor anchor = net->forward(rig.Randn({4, 6}));
    return torch::triplet_margin_loss(anchor, net->forward(rig.Randn({4, 6})),
                                      net->forward(rig.Randn({4, 6}))) +
           torch::cosine_embedding_loss(anchor, net->forward(rig.Randn({4, 6})),
                                        torch::ones({4}));
  });
}

ZOO_VARIANT(Hypernetwork) {
  nn::Sequential net = Mlp(4, 8, 5 * 3 + 3);
  rig.TrainOn(net.ptr(), [&] {
    const Tensor made = net->forward(rig.Randn({4}));
    const Tensor w = made.narrow(0, 0, 15).view({3, 5});
    return torch::linear(rig.Randn({6, 5}), w, made.narrow(0, 15, 3))
        .pow(2)
        .mean();
  });
}

// Each rank runs other experts, and not as many.
ZOO_VARIANT(MixtureOfExpertsOfTheRanksChoice) {
  auto net = std::make_shared<nn::Module>();
  std::vector<nn::Sequential> experts;
  for (int i = 0; i < 4; ++i) {
    experts.push_back(
        net->register_module(absl::StrCat("expert", i), Mlp(5, 7, 5)));
  }
  int64_t round = 0;
  rig.TrainOn(net, [&] {
    Tensor h = rig.Randn({3, 5});
    for (int i = 0; i <= rig.rank(); ++i) {
      h = h + experts[(round + i * 2 + rig.rank()) % 4]->forward(h);
    }
    ++round;
    return h.pow(2).mean();
  });
}

ZOO_VARIANT(GraphNetwork) {
  nn::Sequential net = Mlp(5, 8, 3);
  rig.TrainOn(net.ptr(), [&] {
    const Tensor graph = torch::sparse_coo_tensor(rig.Tokens(7, {2, 15}),
                                                  torch::rand({15}), {7, 7})
                             .coalesce();
    return torch::mm(graph, net->forward(rig.Randn({7, 5}))).pow(2).mean();
  });
}

ZOO_VARIANT(VariationalAutoencoder) {
  auto net = std::make_shared<nn::Module>();
  auto encoder = net->register_module("encoder", Mlp(8, 9, 6));
  auto decoder = net->register_module("decoder", Mlp(3, 9, 8));
  rig.TrainOn(net, [&] {
    const Tensor x = rig.Randn({4, 8});
    const auto moments = encoder->forward(x).chunk(2, -1);
    const Tensor z =
        moments[0] + torch::randn_like(moments[0]) * (moments[1] / 2).exp();
    const Tensor kl =
        (moments[0].pow(2) + moments[1].exp() - 1 - moments[1]).mean();
    return torch::mse_loss(decoder->forward(z), x) + 0.1 * kl;
  });
}

ZOO_VARIANT(PolicyGradient) {
  nn::Sequential net = Mlp(4, 8, 3);
  rig.TrainOn(net.ptr(), [&] {
    const Tensor logs = torch::log_softmax(net->forward(rig.Randn({6, 4})), -1);
    const Tensor action = torch::multinomial(logs.detach().exp(), 1);
    return -(logs.gather(1, action).squeeze(1) * rig.Randn({6})).mean();
  });
}

ZOO_VARIANT(SpeechWithCtc) {
  nn::Sequential net = Mlp(5, 9, 6);
  rig.TrainOn(net.ptr(), [&] {
    const Tensor logs =
        torch::log_softmax(net->forward(rig.Randn({8, 2, 5})), -1);
    return torch::ctc_loss(logs, 1 + rig.Tokens(5, {2, 3}),
                           torch::full({2}, 8, torch::kLong),
                           torch::full({2}, 3, torch::kLong));
  });
}

ZOO_VARIANT(AdaptiveSoftmax) {
  nn::AdaptiveLogSoftmaxWithLoss net(
      nn::AdaptiveLogSoftmaxWithLossOptions(20, 20, {5, 12}));
  rig.TrainOn(net.ptr(), [&] {
    return -net(rig.Randn({9, 20}), rig.Tokens(20, {9})).output.mean();
  });
}

}  // namespace
}  // namespace tessera::zoo
