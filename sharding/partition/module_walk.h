// ModuleWalk: the modules and parameters below a module, under all their names.
#ifndef SHARDING_PARTITION_MODULE_WALK_H_
#define SHARDING_PARTITION_MODULE_WALK_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"

namespace torch::nn {
class Module;
}

namespace tessera {

struct ModuleWalk {
  struct Module {
    const torch::nn::Module* module;
    std::string path;  // "" for the root
    int parent;        // in `modules`; -1 for the root
    int depth;         // 0 for the root
  };
  struct Parameter {
    std::string name;
    at::Tensor tensor;
    int module;  // in `modules`
  };
  // The order is that of libtorch's named_modules() and named_parameters(): a
  // module comes before what is below it, in order of registration. What is
  // registered in several places is listed for each of them.
  std::vector<Module> modules;
  std::vector<Parameter> parameters;
};

// Walks a module. LOCAL, O(names). The root must outlive the result.
ModuleWalk WalkModule(const torch::nn::Module& root);

// Returns a number that stays the same as long as the module has the same
// tensors, whatever their values; cheaper than their names. LOCAL, O(modules
// and parameters).
uint64_t FingerprintOfParameters(const torch::nn::Module& root);

}  // namespace tessera
#endif  // SHARDING_PARTITION_MODULE_WALK_H_
