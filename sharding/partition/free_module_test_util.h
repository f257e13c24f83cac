// FreeModule: a module for tests, to which anything can be added.
#ifndef SHARDING_PARTITION_FREE_MODULE_TEST_UTIL_H_
#define SHARDING_PARTITION_FREE_MODULE_TEST_UTIL_H_

#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "sharding/partition/named_parameter.h"

namespace tessera {

struct FreeModule : torch::nn::Module {
  void Add(const std::string& name, at::Tensor tensor, bool trainable = true) {
    register_parameter(name, std::move(tensor), trainable);
  }
  void Add(const std::string& name, std::shared_ptr<torch::nn::Module> module) {
    register_module(name, std::move(module));
  }
  // Registers the tensor `to` under another name, too.
  void Tie(const std::string& name, const std::string& to) {
    const at::Tensor tensor = named_parameters()[to];
    register_parameter(name, tensor, tensor.requires_grad());
  }
};

// Returns the names, in order, separated by spaces.
inline std::string Names(const std::vector<NamedParameter>& parameters) {
  return absl::StrJoin(parameters, " ",
                       [](std::string* out, const NamedParameter& p) {
                         absl::StrAppend(out, p.name);
                       });
}

}  // namespace tessera
#endif  // SHARDING_PARTITION_FREE_MODULE_TEST_UTIL_H_
