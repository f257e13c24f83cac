// Defines what benchmarks/host_cost trains, and trains it with plain libtorch.
#ifndef BENCHMARKS_PLAIN_TRAINING_H_
#define BENCHMARKS_PLAIN_TRAINING_H_

#include <torch/torch.h>

#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "benchmarks/gpt/plain_libtorch.h"

namespace tessera {

inline constexpr double kLr = 1e-3, kWeightDecay = 0.1;

// A block of a transformer: 12 parameters.
struct Block : torch::nn::Module {
  explicit Block(int64_t dim)
      : norm1(register_module("norm1", Norm(dim))),
        qkv(register_module("qkv", torch::nn::Linear(dim, 3 * dim))),
        proj(register_module("proj", torch::nn::Linear(dim, dim))),
        norm2(register_module("norm2", Norm(dim))),
        up(register_module("up", torch::nn::Linear(dim, 4 * dim))),
        down(register_module("down", torch::nn::Linear(4 * dim, dim))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto qkv_of_x = qkv(norm1(x)).chunk(3, -1);
    const at::Tensor attention =
        torch::softmax(qkv_of_x[0].matmul(qkv_of_x[1].t()), -1);
    const at::Tensor y = x + proj(attention.matmul(qkv_of_x[2]));
    return y + down(torch::gelu(up(norm2(y))));
  }
  static torch::nn::LayerNorm Norm(int64_t dim) {
    return torch::nn::LayerNorm(torch::nn::LayerNormOptions({dim}));
  }
  torch::nn::LayerNorm norm1;
  torch::nn::Linear qkv, proj;
  torch::nn::LayerNorm norm2;
  torch::nn::Linear up, down;
};

struct Blocks : torch::nn::Module {
  Blocks(int64_t num_blocks, int64_t dim) {
    torch::manual_seed(1);
    for (int64_t i = 0; i < num_blocks; ++i) {
      blocks.push_back(register_module(absl::StrCat("block", i),
                                       std::make_shared<Block>(dim)));
    }
    input = torch::randn({8, dim});
  }
  at::Tensor Loss() {
    at::Tensor x = input;
    for (const auto& block : blocks) x = block->forward(x);
    return x.square().mean();
  }
  std::vector<std::shared_ptr<Block>> blocks;
  at::Tensor input;
};

// Trains Blocks with plain libtorch.
class PlainBlocks {
 public:
  explicit PlainBlocks(std::shared_ptr<Blocks> model)
      : model_(std::move(model)),
        optimizer_(model_->parameters(), kLr, kWeightDecay) {}

  void Step() {
    model_->Loss().backward();
    optimizer_.Step();
  }

 private:
  std::shared_ptr<Blocks> model_;
  PlainAdamW optimizer_;
};

}  // namespace tessera
#endif  // BENCHMARKS_PLAIN_TRAINING_H_
