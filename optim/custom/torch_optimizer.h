// Makes a program's torch::optim::Optimizer a CustomOptimizer: unfused, on
// views of the shards, with libtorch's bits.
//
//   auto sgd = tessera::FromTorch([](std::vector<at::Tensor> parameters) {
//     return std::make_unique<torch::optim::SGD>(
//         std::move(parameters), torch::optim::SGDOptions(0.1).momentum(0.9));
//   });
//   options.optimizer = *sgd;  // EngineOptions
//
// Its rate is the engine's (optimizer.params.lr, schedules, SetLearningRate),
// set in all of its param_groups before each step; all other options are what
// the factory says, and setting them in the configuration is an error.
//
// States of SGD, Adagrad, RMSprop, Adam and AdamW are the engine's, by
// libtorch's names, and so are those of another class if `states` describes
// them. Otherwise they stay in its objects, one for each part of a parameter:
// then training works with only one engine at a time, SaveCheckpoint is an
// error, and after an Offload that changes the slices the step fails.
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

// Makes an optimizer over one-dimensional parts of parameters. Called often,
// perhaps on a thread of the engine. The optimizer must change each element
// independently (CustomOptimizer).
using TorchFactory = std::function<std::unique_ptr<torch::optim::Optimizer>(
    std::vector<at::Tensor> parameters)>;

// The states that an optimizer class keeps for a parameter.
struct TorchStates {
  std::vector<std::string> names;
  // Makes the state after `steps` > 0 steps from its tensors, in the order of
  // `names`. Before the first step the class makes its own.
  std::function<std::unique_ptr<torch::optim::OptimizerParamState>(
      int64_t steps, const std::vector<at::Tensor>& states)>
      make;
  // Returns the tensors of a state, in that order.
  std::function<std::vector<at::Tensor>(
      const torch::optim::OptimizerParamState& state)>
      tensors;
};

// Makes the CustomOptimizer. `name`: in checkpoints; "" is for libtorch's
// classes only. InvalidArgument; Unimplemented for LBFGS, which is not
// elementwise and asks for losses. LOCAL; calls the factory.
absl::StatusOr<CustomOptimizer> FromTorch(
    TorchFactory factory, std::string name = "",
    std::optional<TorchStates> states = std::nullopt);

}  // namespace tessera
#endif  // OPTIM_CUSTOM_TORCH_OPTIMIZER_H_
