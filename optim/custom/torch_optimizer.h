// A program's torch::optim::Optimizer as a CustomOptimizer: unfused, on views
// of the shards, with libtorch's bits.
//
//   auto sgd = tessera::FromTorch([](std::vector<at::Tensor> parameters) {
//     return std::make_unique<torch::optim::SGD>(
//         std::move(parameters), torch::optim::SGDOptions(0.1).momentum(0.9));
//   });
//   options.optimizer = *sgd;  // EngineOptions
//
// Its rate is the engine's (optimizer.params.lr, schedules, SetLearningRate),
// put into all of its param_groups before each step; all other options are what
// the factory says, and to set them in the configuration is an error.
//
// States of SGD, Adagrad, RMSprop, Adam and AdamW are the engine's, by
// libtorch's names; those of another class if `states` says what they are.
// Otherwise they stay in its objects, one for each part of a parameter:
// training works with one engine at a time, SaveCheckpoint does not, and
// Offload of parts that then come in other slices ends the step.
#ifndef OPTIM_CUSTOM_TORCH_OPTIMIZER_H_
#define OPTIM_CUSTOM_TORCH_OPTIMIZER_H_

#include <torch/optim.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "optim/custom/custom_optimizer.h"

namespace tessera {

// Makes one over these, which are one-dimensional parts of parameters. Called
// often, perhaps on a thread of the engine. Whatever it makes changes each
// element by itself (CustomOptimizer).
using TorchFactory = std::function<std::unique_ptr<torch::optim::Optimizer>(
    std::vector<at::Tensor> parameters)>;

// What the class keeps of a parameter.
struct TorchStates {
  std::vector<std::string> names;
  // That of one with which `steps` > 0 steps have been made, of these tensors,
  // in the order of `names`. Before the first the class begins by itself.
  std::function<std::unique_ptr<torch::optim::OptimizerParamState>(
      int64_t steps, const std::vector<at::Tensor>& states)>
      make;
  // Its tensors, in that order.
  std::function<std::vector<at::Tensor>(
      const torch::optim::OptimizerParamState& state)>
      tensors;
};

// `name`: in checkpoints; "" for libtorch's classes alone. InvalidArgument, and
// Unimplemented of LBFGS, which is not elementwise and asks for losses. LOCAL;
// calls the factory.
absl::StatusOr<CustomOptimizer> FromTorch(
    TorchFactory factory, std::string name = "",
    std::optional<TorchStates> states = std::nullopt);

}  // namespace tessera
#endif  // OPTIM_CUSTOM_TORCH_OPTIMIZER_H_
