#include "sharding/gradient/nested_graphs.h"

#include <typeinfo>

#include "absl/strings/match.h"
#include "base/torch/graph_nodes.h"
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
  bool found = false;
  VisitNodes(root, [&](const Node& node) {
    found = IsOfUser(node);
    return !found;
  });
  return found;
}

}  // namespace tessera
