#include "parallel/tensor/part_group.h"

#include <torch/torch.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <type_traits>
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

// The operator whose rule runs on this thread; null: none.
thread_local const std::string* current_operator = nullptr;

// What backward needs, in a saved value of autograd's.
struct ForBackward : torch::CustomClassHolder {
  std::shared_ptr<PartGroup> group;
  int64_t dim = 0, other_dim = 0;
  std::string operator_name;
};

void Keep(AutogradContext* context, PartGroup* group, int64_t dim,
          int64_t other_dim = 0) {
  auto kept = c10::make_intrusive<ForBackward>();
  kept->group = group->shared_from_this();
  kept->dim = dim;
  kept->other_dim = other_dim;
  kept->operator_name = CollectivesOf::Current();
  context->saved_data["kept"] = c10::IValue::make_capsule(std::move(kept));
}

// Returns {f(group, dims...)}, with as many undefined tensors as forward had
// other arguments.
template <typename F>
variable_list Backward(AutogradContext* context, size_t others, const F& f) {
  const auto capsule = context->saved_data["kept"].toCapsule();
  const auto& kept = *static_cast<ForBackward*>(capsule.get());
  const CollectivesOf name(kept.operator_name);
  variable_list gradients(1 + others);
  if constexpr (std::is_invocable_v<F, PartGroup&, int64_t>) {
    gradients[0] = f(*kept.group, kept.dim);
  } else {
    gradients[0] = f(*kept.group, kept.dim, kept.other_dim);
  }
  return gradients;
}

// " of aten::linear", or nothing.
std::string OfOperator() {
  const std::string& name = CollectivesOf::Current();
  return name.empty() ? "" : absl::StrCat(" of ", name);
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
    return Backward(context, 1, [&](PartGroup& group, int64_t /*dim*/) {
      return group.SumInBackward(Whole(gradients[0]));
    });
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
    return Backward(context, 1, [&](PartGroup& group, int64_t /*dim*/) {
      return group.Sum(Whole(gradients[0]));
    });
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
    return Backward(context, 2, [&](PartGroup& group, int64_t dim) {
      return group.Slice(Whole(gradients[0]), dim);
    });
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
    return Backward(context, 2, [&](PartGroup& group, int64_t dim) {
      return group.Gather(Whole(gradients[0]), dim);
    });
  }
};

struct CountOnceFunction : Function<CountOnceFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor,
                            PartGroup* group) {
    Keep(context, group, 0);
    return tensor.view_as(tensor);
  }
  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    return Backward(context, 1, [&](PartGroup& group, int64_t /*dim*/) {
      return group.AddendOf(Whole(gradients[0]));
    });
  }
};

// The gradient of addends is equal on all ranks.
struct AddendFunction : Function<AddendFunction> {
  static at::Tensor forward(AutogradContext* /*context*/,
                            const at::Tensor& tensor, PartGroup* group) {
    return group->rank() == 0 ? tensor.view_as(tensor) : at::zeros_like(tensor);
  }
  static variable_list backward(AutogradContext* /*context*/,
                                variable_list gradients) {
    return {gradients[0], at::Tensor()};
  }
};

struct ExchangeFunction : Function<ExchangeFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& part,
                            int64_t from, int64_t to, PartGroup* group) {
    Keep(context, group, from, to);
    return group->ExchangeOf(part, from, to);
  }
  static variable_list backward(AutogradContext* context,
                                variable_list gradients) {
    return Backward(context, 3,
                    [&](PartGroup& group, int64_t from, int64_t to) {
                      return group.Exchange(Whole(gradients[0]), to, from);
                    });
  }
};

// Returns the dimensions as they lie in memory, the outermost first.
std::vector<int64_t> MemoryOrder(const at::Tensor& tensor) {
  std::vector<int64_t> order(static_cast<size_t>(tensor.dim()));
  std::iota(order.begin(), order.end(), 0);
  if (tensor.is_contiguous() || !tensor.is_non_overlapping_and_dense()) {
    return order;
  }
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return tensor.stride(a) > tensor.stride(b);
  });
  return order;
}

}  // namespace

std::vector<int64_t> StridesLike(const at::Tensor& part,
                                 at::IntArrayRef sizes) {
  const std::vector<int64_t> order = MemoryOrder(part);
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (auto dim = order.rbegin(); dim != order.rend(); ++dim) {
    strides[static_cast<size_t>(*dim)] = stride;
    stride *= std::max<int64_t>(sizes[static_cast<size_t>(*dim)], 1);
  }
  return strides;
}

CollectivesOf::CollectivesOf(const std::string& name)
    : before_(std::exchange(current_operator, &name)) {}
CollectivesOf::~CollectivesOf() { current_operator = before_; }

const std::string& CollectivesOf::Current() {
  static const auto* const none = new std::string();
  return current_operator == nullptr ? *none : *current_operator;
}

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

at::Tensor PartGroup::CountOnce(const at::Tensor& tensor) {
  if (!tensor.requires_grad() || !at::GradMode::is_enabled()) return tensor;
  return CountOnceFunction::apply(tensor, this);
}

at::Tensor PartGroup::AddendOf(const at::Tensor& tensor) {
  if (tensor.requires_grad() && at::GradMode::is_enabled()) {
    return AddendFunction::apply(tensor, this);
  }
  return rank() == 0 ? tensor : at::zeros_like(tensor);
}

at::Tensor PartGroup::Exchange(const at::Tensor& part, int64_t from,
                               int64_t to) {
  return ExchangeFunction::apply(part, from, to, this);
}

at::Tensor PartGroup::Gather(const at::Tensor& part, int64_t dim) {
  return GatherFunction::apply(part, dim, this);
}

at::Tensor PartGroup::Slice(const at::Tensor& whole, int64_t dim) {
  return SliceFunction::apply(whole, dim, this);
}

// Within a TorchScope no watch sees the operators (header).
at::Tensor PartGroup::SumOf(const at::Tensor& addend) {
  TorchScope scope;
  at::Tensor sum = addend.clone(at::MemoryFormat::Contiguous);
  ++collectives_;
  ThrowIfError(
      ranks_
          ->AllReduceSum(sum.is_complex() ? at::view_as_real(sum) : sum,
                         {absl::StrCat("sum of parts", OfOperator())})
          .Wait());
  return sum;
}

at::Tensor PartGroup::GatherOf(const at::Tensor& part, int64_t dim) {
  TorchScope scope;
  const std::vector<int64_t> order = MemoryOrder(part);
  const at::Tensor mine = part.permute(order).contiguous();
  std::vector<int64_t> sizes = part.sizes().vec();
  sizes[static_cast<size_t>(dim)] *= size();
  // The result is no view, which autograd would not let a program write.
  const at::Tensor whole =
      at::empty_strided(sizes, StridesLike(part, sizes), part.options());
  at::Tensor ordered = whole.permute(order);
  const auto along = std::find(order.begin(), order.end(), dim) - order.begin();
  const at::Tensor all =
      along == 0 ? ordered.view({-1})
                 : at::empty({size() * mine.numel()}, mine.options());
  ++collectives_;
  ThrowIfError(
      ranks_
          ->AllGather(mine.view({-1}), all,
                      {absl::StrCat("parts of a tensor", OfOperator())})
          .Wait());
  if (along == 0) return whole;
  std::vector<at::Tensor> parts;
  for (const at::Tensor& one : all.chunk(size())) {
    parts.push_back(one.view(mine.sizes()));
  }
  at::cat_out(ordered, parts, along);
  return whole;
}

at::Tensor PartGroup::ExchangeOf(const at::Tensor& part, int64_t from,
                                 int64_t to) {
  TorchScope scope;
  CheckDivides(part, to);
  const at::Tensor sent = at::stack(part.chunk(size(), to));
  const at::Tensor received = at::empty_like(sent);
  ++collectives_;
  ThrowIfError(ranks_
                   ->AllToAll(sent.view({-1}), received.view({-1}),
                              {absl::StrCat("parts of a tensor along another "
                                            "dimension",
                                            OfOperator())})
                   .Wait());
  return at::cat(received.unbind(), from);
}

void PartGroup::CheckDivides(const at::Tensor& whole, int64_t dim) const {
  if (whole.size(dim) % size() == 0) return;
  ThrowIfError(absl::InvalidArgumentError(absl::StrCat(
      "dimension ", dim, " of a tensor [", absl::StrJoin(whole.sizes(), ", "),
      "] is to be divided by ", size(), " ranks, and cannot be")));
}

at::Tensor PartGroup::SliceOf(const at::Tensor& whole, int64_t dim) const {
  CheckDivides(whole, dim);
  const int64_t all = whole.size(dim);
  return whole.narrow(dim, rank() * (all / size()), all / size());
}

}  // namespace tessera
