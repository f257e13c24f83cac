#include "sharding/module_walk.h"

#include "absl/strings/str_cat.h"
#include "torch/nn/module.h"

namespace tessera {
namespace {

std::string Join(const std::string& path, const std::string& name) {
  return path.empty() ? name : absl::StrCat(path, ".", name);
}

void Walk(const torch::nn::Module& module, std::string path, int parent,
          int depth, ModuleWalk* out) {
  const int self = static_cast<int>(out->modules.size());
  out->modules.push_back({&module, path, parent, depth});
  for (const auto& p : module.named_parameters(/*recurse=*/false)) {
    out->parameters.push_back({Join(path, p.key()), p.value(), self});
  }
  for (const auto& child : module.named_children()) {
    Walk(*child.value(), Join(path, child.key()), self, depth + 1, out);
  }
}

// Parameters by name are copies of all names; the member is protected.
struct ParameterAccess : torch::nn::Module {
  static const auto& Of(const torch::nn::Module& module) {
    return module.*(&ParameterAccess::parameters_);
  }
};

}  // namespace

ModuleWalk WalkModule(const torch::nn::Module& root) {
  ModuleWalk walk;
  Walk(root, "", -1, 0, &walk);
  return walk;
}

size_t CountParameters(const torch::nn::Module& root) {
  size_t count = 0;
  for (const auto& p : ParameterAccess::Of(root)) count += p.value().defined();
  for (const auto& child : root.children()) count += CountParameters(*child);
  return count;
}

}  // namespace tessera
