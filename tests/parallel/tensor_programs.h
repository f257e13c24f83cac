// Programs that compute a loss with an ordinary module, for tests that divide
// its parameters among ranks: nothing in a program knows of that.
#ifndef TESTS_PARALLEL_TENSOR_PROGRAMS_H_
#define TESTS_PARALLEL_TENSOR_PROGRAMS_H_

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "parallel/tensor/placed.h"

namespace tessera {

// A block of a transformer, as C++ writes it.
struct DividedBlockImpl : torch::nn::Module {
  static constexpr int64_t kDim = 12, kHeads = 6;

  DividedBlockImpl();
  at::Tensor Heads(const at::Tensor& x);
  at::Tensor forward(at::Tensor x);

  torch::nn::LayerNorm n1{torch::nn::LayerNormOptions({kDim})},
      n2{torch::nn::LayerNormOptions({kDim})};
  torch::nn::Linear q{nullptr}, k{nullptr}, v{nullptr}, o{nullptr}, up{nullptr},
      down{nullptr};
};
TORCH_MODULE(DividedBlock);

// In float64.
struct DividedNetImpl : torch::nn::Module {
  static constexpr int64_t kDim = DividedBlockImpl::kDim, kWords = 18;

  DividedNetImpl();
  at::Tensor Hidden(const at::Tensor& t) { return b(a(words(t))); }

  torch::nn::Embedding words{kWords, kDim};
  DividedBlock a, b;
  torch::nn::Linear head{torch::nn::LinearOptions(kDim, kWords).bias(false)};
};
TORCH_MODULE(DividedNet);

// Sizes of `tokens`.
inline constexpr int64_t kProgramBatch = 2, kProgramLength = 6;

// Computes a loss with the module. `tokens` are [batch, length].
using TensorProgram =
    std::function<at::Tensor(DividedNet& net, const at::Tensor& tokens)>;
using TensorPrograms = std::map<std::string, TensorProgram>;

// What a forward does.
TensorPrograms ForwardPrograms();
// What becomes of gradients: hooks, .grad(), optimizers, clipping.
TensorPrograms GradientPrograms();

// The loss of hidden states [batch, length, dim].
at::Tensor ProgramLoss(DividedNet& net, const at::Tensor& x,
                       const at::Tensor& tokens);
// The targets that go with tokens.
at::Tensor ProgramTargets(const at::Tensor& tokens);

// A torch::autograd::Function that doubles, with a backward of its own.
at::Tensor DoubledByFunction(const at::Tensor& x);
// One that computes x @ w^T, and saves both.
at::Tensor ProductByFunction(const at::Tensor& x, const at::Tensor& w);

// Along which dimension a parameter of the net is divided; -1: it is whole.
int64_t ProgramDividedAlong(const std::string& parameter);
// Describes by how much the gradient of a parameter differs from `wanted`, if
// that is more than sums in another order do; else returns "". `whole` has the
// gradients of whole parameters.
std::string GradientDiffers(const torch::nn::Module& whole,
                            const std::string& parameter, const at::Tensor& got,
                            const at::Tensor& wanted);

// Divides the parameters. Returns what a rank has of each: itself, or its part.
std::map<std::string, at::Tensor> DivideNet(
    DividedNet& net, const std::shared_ptr<PartGroup>& group);

}  // namespace tessera
#endif  // TESTS_PARALLEL_TENSOR_PROGRAMS_H_
