// Models for tests of traces: one of each common kind, small enough to train in
// a test, with tensors large enough to be traced.
#ifndef SHARDING_TRACE_TRACED_MODELS_TEST_UTIL_H_
#define SHARDING_TRACE_TRACED_MODELS_TEST_UTIL_H_

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "ATen/core/Tensor.h"
#include "torch/nn/module.h"

namespace tessera {

struct TracedModel {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor()> loss;  // of a batch that it makes
};

// Returns functions that make the models, by name: Mlp, Gpt, Llama, Cnn, ...
const std::map<std::string, std::function<TracedModel()>>& TracedModels();

}  // namespace tessera
#endif  // SHARDING_TRACE_TRACED_MODELS_TEST_UTIL_H_
