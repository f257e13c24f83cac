// Walks the graph of a backward.
#ifndef BASE_TORCH_GRAPH_NODES_H_
#define BASE_TORCH_GRAPH_NODES_H_

#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/container/flat_hash_set.h"
#include "torch/csrc/autograd/function.h"

namespace tessera {

// Calls visit(node) for each node of the graph of `root`, once each, until it
// returns false. LOCAL.
template <typename Visit>
void VisitNodes(const at::Tensor& root, const Visit& visit) {
  using torch::autograd::Node;
  std::vector<const Node*> open;
  absl::flat_hash_set<const Node*> seen;
  const auto add = [&](const Node* node) {
    if (node != nullptr && seen.insert(node).second) open.push_back(node);
  };
  add(root.grad_fn().get());
  while (!open.empty()) {
    const Node& node = *open.back();
    open.pop_back();
    if (!visit(node)) return;
    for (const auto& edge : node.next_edges()) add(edge.function.get());
  }
}

}  // namespace tessera
#endif  // BASE_TORCH_GRAPH_NODES_H_
