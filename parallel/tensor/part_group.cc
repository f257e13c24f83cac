#include "parallel/tensor/part_group.h"

#include <torch/torch.h>

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "parallel/tensor/placed.h"

namespace tessera {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// Holds a group in a saved value of autograd's.
struct GroupRef : torch::CustomClassHolder {
  explicit GroupRef(std::shared_ptr<PartGroup> group)
      : group(std::move(group)) {}
  std::shared_ptr<PartGroup> group;
};

void Keep(AutogradContext* context, PartGroup* group, int64_t dim) {
  context->saved_data["group"] = c10::IValue::make_capsule(
      c10::make_intrusive<GroupRef>(group->shared_from_this()));
  context->saved_data["dim"] = dim;
}

PartGroup& GroupIn(AutogradContext* context) {
  const auto capsule = context->saved_data["group"].toCapsule();
  return *static_cast<GroupRef*>(capsule.get())->group;
}

int64_t DimIn(AutogradContext* context) {
  return context->saved_data["dim"].toInt();
}

// Backwards may be differentiated again, and may get a placed gradient, of a
// user's function.
struct SumFunction : Function<SumFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& addend,
                            PartGroup* group) {
    Keep(context, group, 0);
    return group->SumOf(addend);
  }
  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    return {GroupIn(context).SumInBackward(Whole(gradients[0])), at::Tensor()};
  }
};

struct SumInBackwardFunction : Function<SumInBackwardFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor,
                            PartGroup* group) {
    Keep(context, group, 0);
    return tensor.view_as(tensor);
  }
  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    return {GroupIn(context).Sum(Whole(gradients[0])), at::Tensor()};
  }
};

struct GatherFunction : Function<GatherFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& part,
                            int64_t dim, PartGroup* group) {
    Keep(context, group, dim);
    return group->GatherOf(part, dim);
  }
  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    return {GroupIn(context).Slice(Whole(gradients[0]), DimIn(context)),
            at::Tensor(), at::Tensor()};
  }
};

struct SliceFunction : Function<SliceFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& whole,
                            int64_t dim, PartGroup* group) {
    Keep(context, group, dim);
    return group->SliceOf(whole, dim).contiguous();
  }
  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    return {GroupIn(context).Gather(Whole(gradients[0]), DimIn(context)),
            at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor PartGroup::Sum(const at::Tensor& addend) {
  return SumFunction::apply(addend, this);
}

at::Tensor PartGroup::SumInBackward(const at::Tensor& tensor) {
  if (!tensor.requires_grad() || !at::GradMode::is_enabled()) return tensor;
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::shared_ptr<torch::autograd::Node> last = last_.lock();
  if (last != nullptr &&
      last->next_edge(0) == torch::autograd::impl::gradient_edge(tensor)) {
    at::Tensor alias = tensor.detach();
    torch::autograd::impl::set_gradient_edge(alias, {last, 0});
    return alias;
  }
  const at::Tensor alias = SumInBackwardFunction::apply(tensor, this);
  last_ = alias.grad_fn();
  return alias;
}

at::Tensor PartGroup::Gather(const at::Tensor& part, int64_t dim) {
  return GatherFunction::apply(part, dim, this);
}

at::Tensor PartGroup::Slice(const at::Tensor& whole, int64_t dim) {
  return SliceFunction::apply(whole, dim, this);
}

at::Tensor PartGroup::SumOf(const at::Tensor& addend) {
  TorchScope scope;
  at::Tensor sum = addend.clone(at::MemoryFormat::Contiguous);
  ++collectives_;
  ThrowIfError(ranks_->AllReduceSum(sum, {"sum of parts"}).Wait());
  return sum;
}

at::Tensor PartGroup::GatherOf(const at::Tensor& part, int64_t dim) {
  TorchScope scope;
  const at::Tensor mine = part.contiguous();
  const at::Tensor all = at::empty({size() * mine.numel()}, mine.options());
  ++collectives_;
  ThrowIfError(
      ranks_->AllGather(mine.view({-1}), all, {"parts of a tensor"}).Wait());
  std::vector<at::Tensor> parts;
  for (const at::Tensor& one : all.chunk(size())) {
    parts.push_back(one.view(mine.sizes()));
  }
  return at::cat(parts, dim);
}

at::Tensor PartGroup::SliceOf(const at::Tensor& whole, int64_t dim) const {
  const int64_t all = whole.size(dim);
  if (all % size() != 0) {
    ThrowIfError(absl::InvalidArgumentError(absl::StrCat(
        "dimension ", dim, " of a tensor [", absl::StrJoin(whole.sizes(), ", "),
        "] is to be divided by ", size(), " ranks, and cannot be")));
  }
  return whole.narrow(dim, rank() * (all / size()), all / size());
}

}  // namespace tessera
