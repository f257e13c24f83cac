#include "sharding/partition/module_walk.h"

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

uint64_t FingerprintOfParameters(const torch::nn::Module& root) {
  uint64_t sum = 0;
  for (const auto& p : ParameterAccess::Of(root)) {
    if (!p.value().defined()) continue;
    const auto address =
        reinterpret_cast<uintptr_t>(p.value().unsafeGetTensorImpl());
    const uint64_t mixed = (address >> 4) * 0x9e3779b97f4a7c15u;
    sum += (mixed ^ (mixed >> 32)) * 0x9e3779b97f4a7c15u;
  }
  for (const auto& child : root.children())
    sum += FingerprintOfParameters(*child);
  return sum;
}

}  // namespace tessera
