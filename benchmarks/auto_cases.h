// The cases of auto_choice are small models of mixed kinds, each with what it
// leaves to auto and the memory that it may use.
#ifndef BENCHMARKS_AUTO_CASES_H_
#define BENCHMARKS_AUTO_CASES_H_

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "benchmarks/gpt/peer_gpt.h"

namespace tessera {

struct Model {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(int64_t samples)> loss;
};

struct Case {
  std::string name;
  std::string backend;
  std::function<Model()> make;
  // The memory limit as a fraction of what stage 0 needs if it keeps all
  // activations; 0: no limit.
  double memory = 0;
  int64_t samples = 2;  // of a rank in a step
  bool auto_micro_batch = false;
  bool bf16 = false;
};

inline Model Gpt(int64_t dim, int64_t layers, int64_t seq) {
  auto gpt = std::make_shared<PeerGpt>(PeerGptOptions{dim, layers, 4, seq});
  return {gpt, [gpt, seq](int64_t samples) {
            const at::Tensor tokens =
                torch::randint(256, {samples, seq}, torch::kLong);
            return gpt->Loss(tokens, tokens);
          }};
}

inline Model Mlp(int64_t dim, int64_t layers) {
  torch::nn::Sequential mlp;
  for (int64_t i = 0; i < layers; ++i) {
    mlp->push_back(torch::nn::Linear(dim, dim));
    mlp->push_back(torch::nn::ReLU());
  }
  return {mlp.ptr(), [mlp, dim](int64_t samples) mutable {
            return mlp->forward(torch::randn({samples, dim})).square().mean();
          }};
}

inline Model Cnn(int64_t channels, int64_t blocks, int64_t size) {
  torch::nn::Sequential cnn;
  int64_t in = 3;
  for (int64_t i = 0; i < blocks; ++i) {
    cnn->push_back(torch::nn::Conv2d(
        torch::nn::Conv2dOptions(in, channels, 3).padding(1).bias(false)));
    cnn->push_back(torch::nn::BatchNorm2d(channels));
    cnn->push_back(torch::nn::ReLU());
    in = channels;
  }
  cnn->push_back(torch::nn::AdaptiveAvgPool2d(1));
  cnn->push_back(torch::nn::Flatten());
  cnn->push_back(torch::nn::Linear(channels, 10));
  return {cnn.ptr(), [cnn, size](int64_t samples) mutable {
            return torch::nn::functional::cross_entropy(
                cnn->forward(torch::randn({samples, 3, size, size})),
                torch::zeros({samples}, torch::kLong));
          }};
}

inline std::vector<Case> Cases() {
  return {
      {"tiny MLP", "shm", [] { return Mlp(64, 3); }},
      {"tiny GPT", "gloo", [] { return Gpt(64, 2, 32); }},
      {"small GPT", "gloo", [] { return Gpt(256, 4, 128); }},
      {"wide MLP, states for 0.6", "shm", [] { return Mlp(1024, 8); }, 0.6},
      {"wide MLP, states for 0.7", "gloo", [] { return Mlp(1024, 8); }, 0.7},
      {"long GPT, activations for 0.5", "shm", [] { return Gpt(128, 8, 256); },
       0.5, 4},
      {"GPT, all for 0.35", "shm", [] { return Gpt(256, 8, 128); }, 0.35, 8},
      {"GPT, micro-batch, 0.4", "shm", [] { return Gpt(128, 6, 128); }, 0.4, 16,
       true},
      {"CNN, micro-batch, 0.5", "shm", [] { return Cnn(32, 6, 32); }, 0.5, 16,
       true},
      {"bf16 GPT, all for 0.5", "shm", [] { return Gpt(256, 6, 128); }, 0.5, 8,
       false, true},
      {"GPT, all for 0.45", "gloo", [] { return Gpt(256, 6, 128); }, 0.45, 8},
      {"GPT, micro-batch, any memory", "gloo", [] { return Gpt(128, 4, 64); },
       0, 8, true},
  };
}

}  // namespace tessera
#endif  // BENCHMARKS_AUTO_CASES_H_
