#include "sharding/gradient/nested_graphs.h"

#include <typeinfo>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "torch/csrc/autograd/function.h"

namespace tessera {
namespace {

using torch::autograd::Node;

// By the type's mangled name: libtorch's nodes have no other sign in common.
bool IsOfUser(const Node& node) {
  const absl::string_view type = typeid(node).name();
  return !absl::StartsWith(type, "N5torch8autograd") ||
         absl::StartsWith(type, "N5torch8autograd7CppNode");
}

}  // namespace

bool GraphMayNest(const at::Tensor& root) {
  std::vector<const Node*> open;
  absl::flat_hash_set<const Node*> seen;
  auto visit = [&](const Node* node) {
    if (node != nullptr && seen.insert(node).second) open.push_back(node);
  };
  visit(root.grad_fn().get());
  while (!open.empty()) {
    const Node& node = *open.back();
    open.pop_back();
    if (IsOfUser(node)) return true;
    for (const auto& edge : node.next_edges()) visit(edge.function.get());
  }
  return false;
}

}  // namespace tessera
