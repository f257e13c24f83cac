// Transformers as programs write them, for tests of plans.
#ifndef PARALLEL_PLAN_PLANNED_MODELS_TEST_UTIL_H_
#define PARALLEL_PLAN_PLANNED_MODELS_TEST_UTIL_H_

#include <cstdint>
#include <vector>

#include "ATen/core/Tensor.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"
#include "torch/nn/pimpl.h"

namespace tessera {

struct PlannedNetOptions {
  int64_t layers = 2, dim = 24, heads = 6, words = 30;
  int64_t key_heads = 6;  // of keys and values
  // Queries, keys and values by one product.
  bool fused = false;
  // Root-mean-square norms, gated products, positions by rotation, no biases;
  // else as GPT-2.
  bool llama = false;
  bool tied = false;  // the head's weight is the table's
};

// A norm in either style.
struct PlannedNormImpl : torch::nn::Module {
  PlannedNormImpl(int64_t dim, bool rms);
  at::Tensor forward(const at::Tensor& x);
  at::Tensor weight, bias;
};
TORCH_MODULE(PlannedNorm);

struct PlannedBlockImpl : torch::nn::Module {
  explicit PlannedBlockImpl(const PlannedNetOptions& options);
  at::Tensor forward(const at::Tensor& x);
  // Query, key and value, [batch, heads, length, dims].
  std::vector<at::Tensor> Heads(const at::Tensor& x);

  const PlannedNetOptions options;
  PlannedNorm n1{nullptr}, n2{nullptr};
  torch::nn::Linear q{nullptr}, k{nullptr}, v{nullptr}, qkv{nullptr},
      o{nullptr}, gate{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(PlannedBlock);

struct PlannedNetImpl : torch::nn::Module {
  explicit PlannedNetImpl(const PlannedNetOptions& options);
  at::Tensor Loss(const at::Tensor& tokens);

  const PlannedNetOptions options;
  torch::nn::Embedding words{nullptr};
  std::vector<PlannedBlock> blocks;
  PlannedNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(PlannedNet);

struct PlannedExpertImpl : torch::nn::Module {
  explicit PlannedExpertImpl(int64_t dim);
  torch::nn::Linear up, down;
};
TORCH_MODULE(PlannedExpert);

// Four experts, all of which see each row of the input.
struct PlannedMixtureImpl : torch::nn::Module {
  explicit PlannedMixtureImpl(int64_t dim);
  at::Tensor Loss(const at::Tensor& x);

  torch::nn::Linear router;
  std::vector<PlannedExpert> experts;
};
TORCH_MODULE(PlannedMixture);

}  // namespace tessera
#endif  // PARALLEL_PLAN_PLANNED_MODELS_TEST_UTIL_H_
