// Products of matrices. With Megatron-LM's words: a matrix that is divided
// along its outputs is column-parallel and gives parts of the result; along its
// inputs row-parallel, and gives addends of it.
#include <torch/torch.h>

#include <optional>
#include <utility>

#include "parallel/tensor/rules.h"

namespace tessera {
namespace {

// How the parts of two factors multiply: what each gives, and what the product
// of these is of the whole.
struct Plan {
  at::Tensor a, b;
  std::optional<TensorPlacement> result;  // none: addends of the whole
};

// Along which dimension a factor is divided; -1: it is not.
int64_t DividedAlong(const at::Tensor& tensor) {
  return DividedDim(tensor).value_or(-1);
}

// `a`: [..., m, k], `b`: [k, n], or [..., k, n] with the same leading sizes;
// `transposed`: b is [n, k].
std::optional<Plan> PlanProduct(const at::Tensor& a, const at::Tensor& b,
                                bool transposed,
                                const std::shared_ptr<PartGroup>& group) {
  if (a.dim() < 2 || b.dim() < 2) return std::nullopt;
  const int64_t along_a = DividedAlong(a), along_b = DividedAlong(b);
  const int64_t last_a = a.dim() - 1, last_b = b.dim() - 1;
  const int64_t inputs_b = transposed ? last_b : last_b - 1;
  const int64_t outputs_b = transposed ? last_b - 1 : last_b;
  const bool matrix = b.dim() == 2;
  const bool same = a.dim() == b.dim() && a.sizes().slice(0, last_a - 1) ==
                                              b.sizes().slice(0, last_b - 1);
  if (!matrix && !same) return std::nullopt;
  const int64_t result_dims = a.dim();
  const std::optional<TensorPlacement> a_shard = ShardOf(a);
  const std::optional<TensorPlacement> b_shard = ShardOf(b);
  // Rows of a, where b is whole, or divided other than along a batch.
  const bool by_rows =
      matrix
          ? !b_shard.has_value() && a_shard.has_value() && a_shard->dim < last_a
          : along_a == last_a - 1 && (along_b < 0 || along_b >= last_b - 1);
  if (by_rows) {
    return Plan{PartForUse(a), WholeForParts(b, group), a_shard};
  }
  if (b_shard.has_value() && b_shard->dim == outputs_b) {  // column-parallel
    return Plan{WholeForParts(a, group), PartForUse(b),
                TensorPlacement::Shard(result_dims - 1, b_shard->groups)};
  }
  if (along_b == inputs_b) {  // row-parallel
    return Plan{PartAs(a, last_a, group), PartForUse(b), std::nullopt};
  }
  if (along_b >= 0) {  // of a batch
    return Plan{PartAs(a, along_b, group), PartForUse(b),
                TensorPlacement::Shard(along_b)};
  }
  if (along_a < 0) return std::nullopt;
  if (along_a == last_a) {
    return Plan{PartForUse(a), PartAs(b, inputs_b, group), std::nullopt};
  }
  if (matrix) return std::nullopt;  // rows of a, inputs of b by groups
  return Plan{PartForUse(a), PartAs(b, along_a, group),
              TensorPlacement::Shard(along_a)};
}

// Ends a call with a product of parts; addends are added up.
bool ReturnProduct(PlacedCall& call, at::Tensor product,
                   const std::optional<TensorPlacement>& placement) {
  if (!placement.has_value()) {
    return call.Return(call.group()->Sum(product));
  }
  return call.Return(std::move(product), *placement);
}

bool MatmulRule(PlacedCall& call) {
  const std::optional<Plan> plan =
      PlanProduct(call.tensor(0), call.tensor(1), false, call.group());
  if (!plan.has_value()) return false;
  return ReturnProduct(call, at::matmul(plan->a, plan->b), plan->result);
}

// A bias goes with each part of the outputs, and once to a sum.
bool LinearRule(PlacedCall& call) {
  const at::Tensor bias = call.tensor(2);
  const std::optional<Plan> plan =
      PlanProduct(call.tensor(0), call.tensor(1), true, call.group());
  if (!plan.has_value()) return false;
  const auto& group = call.group();
  const int64_t last = call.tensor(0).dim() - 1;
  if (!plan->result.has_value()) {
    at::Tensor sum = group->Sum(at::linear(plan->a, plan->b));
    return call.Return(bias.defined() ? sum + Whole(bias) : sum);
  }
  at::Tensor part;
  if (bias.defined()) {
    part = plan->result->dim == last
               ? PartAs(bias, TensorPlacement::Shard(0, plan->result->groups),
                        group)
               : WholeForParts(bias, group);
  }
  return call.Return(at::linear(plan->a, plan->b, part), *plan->result);
}

// bias + a @ b, as torch::nn::functional::linear calls it.
bool AddmmRule(PlacedCall& call) {
  const at::Tensor bias = call.tensor(0);
  if (call[3].toScalar().toDouble() != 1 ||
      call[4].toScalar().toDouble() != 1) {
    return false;
  }
  const std::optional<Plan> plan =
      PlanProduct(call.tensor(1), call.tensor(2), false, call.group());
  if (!plan.has_value()) return false;
  const auto& group = call.group();
  if (!plan->result.has_value()) {
    return call.Return(group->Sum(at::mm(plan->a, plan->b)) + Whole(bias));
  }
  const bool per_output = plan->result->dim == 1;
  const int64_t along = bias.dim() - (per_output ? 1 : 2);
  const at::Tensor part =
      along >= 0 && bias.size(along) > 1
          ? PartAs(bias, TensorPlacement::Shard(along, plan->result->groups),
                   group)
          : WholeForParts(bias, group);
  return call.Return(at::addmm(part, plan->a, plan->b), *plan->result);
}

}  // namespace

std::vector<NamedRule> ProductRules() {
  return {{"aten::matmul.", &MatmulRule},
          {"aten::mm.", &MatmulRule},
          {"aten::bmm.", &MatmulRule},
          {"aten::linear", &LinearRule},
          {"aten::addmm.", &AddmmRule}};
}

}  // namespace tessera
