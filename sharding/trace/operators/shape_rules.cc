#include "sharding/trace/operators/shape_rules.h"

#include "ATen/Functions.h"
#include "ATen/WrapDimUtils.h"

namespace tessera {
namespace {

using Args = OperatorArguments;
using Results = OperatorResults;

// What an elementwise kernel makes of argument I.
template <size_t I>
Results Like(const Args& args) {
  return {at::empty_like(args.tensor(I))};
}
// Returns a contiguous result of the sizes of argument I.
template <size_t I>
Results ContiguousLike(const Args& args) {
  return {at::empty_like(args.tensor(I), at::MemoryFormat::Contiguous)};
}
template <size_t I>
Results ItselfIs(const Args& args) {
  return {args.tensor(I)};
}
// Returns nothing, for operators that only look at values.
Results Nothing(const Args& /*args*/) { return {}; }
Results BooleanLike(const Args& args) {
  return {at::empty_like(args.tensor(0),
                         args.tensor(0).options().dtype(at::kBool))};
}
Results ScalarLike(const Args& args) {
  return {at::empty({}, args.tensor(0).options())};
}
// Elementwise of arguments I and J.
template <size_t I, size_t J>
Results Broadcast(const Args& args) {
  return {at::mul(args.tensor(I), args.tensor(J))};
}

Results Where(const Args& args) {
  const at::Tensor self = args.tensor(1), other = args.tensor(2);
  const auto dtype = at::result_type(self, other);
  return {
      at::addcmul(self.to(dtype), other.to(dtype), args.tensor(0).to(dtype))};
}

// loss(self, target, reduction at R).
template <size_t R>
Results Loss(const Args& args) {
  if (args.integer(R) != 0) return ScalarLike(args);  // at::Reduction::None
  return Broadcast<0, 1>(args);
}

// Its result has a storage as large as its input's.
Results BinaryCrossEntropy(const Args& args) {
  const at::Tensor loss = at::empty_like(args.tensor(0));
  return {args.integer(3) == 0 ? loss : loss.as_strided({}, {})};
}

// (self, dim?, correction, keepdim), one result of each.
at::Tensor ReducedOver(const Args& args, size_t dim, size_t keepdim) {
  const at::Tensor self = args.tensor(0);
  std::vector<int64_t> dims;
  if (args.has(dim)) dims = args.integers(dim);
  return at::sum(self, dims, args.boolean(keepdim), self.scalar_type());
}
Results Variance(const Args& args) { return {ReducedOver(args, 1, 3)}; }
Results VarianceAndMean(const Args& args) {
  return {ReducedOver(args, 1, 3), ReducedOver(args, 1, 3)};
}
Results NanSum(const Args& args) { return {ReducedOver(args, 1, 2)}; }

Results Product(const Args& args) {
  const at::Tensor self = args.tensor(0);
  return {at::empty(
      {}, self.options().dtype(c10::isIntegralType(self.scalar_type(), true)
                                   ? at::kLong
                                   : self.scalar_type()))};
}

Results IndexSelect(const Args& args) {
  const at::Tensor self = args.tensor(0);
  std::vector<int64_t> sizes = self.sizes().vec();
  if (!sizes.empty()) {
    sizes[static_cast<size_t>(at::maybe_wrap_dim(
        args.integer(1), self.dim()))] = args.tensor(2).numel();
  }
  return {at::empty(sizes, self.options())};
}

Results Dropout(const Args& args) {
  const at::Tensor input = args.tensor(0);
  return {at::empty_like(input),
          at::empty_like(input, input.options().dtype(at::kBool))};
}

Results LogSigmoid(const Args& args) {
  const at::Tensor self = args.tensor(0);
  return {at::empty_like(self), at::empty_like(self)};
}

Results Multinomial(const Args& args) {
  std::vector<int64_t> sizes = args.tensor(0).sizes().vec();
  sizes.back() = args.integer(1);
  return {at::empty(sizes, args.tensor(0).options().dtype(at::kLong))};
}

ShapeRules ElementwiseRules() {
  return {
      {"aten::copy_", ItselfIs<0>},
      // Checked where the values are known.
      {"aten::_assert_async", Nothing},
      {"aten::_assert_async.msg", Nothing},
      {"aten::relu", Like<0>},
      {"aten::hardswish", Like<0>},
      {"aten::hardswish_backward", Like<1>},
      {"aten::hardtanh", Like<0>},
      {"aten::hardtanh_backward", Like<1>},
      {"aten::glu_backward", ContiguousLike<1>},
      {"aten::log_sigmoid_forward", LogSigmoid},
      {"aten::log_sigmoid_backward", Like<0>},
      {"aten::logit", Like<0>},
      {"aten::flip", Like<0>},
      {"aten::roll", ContiguousLike<0>},
      {"aten::isnan", BooleanLike},
      {"aten::_prelu_kernel", Like<0>},
      {"aten::mse_loss_backward", Broadcast<1, 2>},
      {"aten::huber_loss", Loss<2>},
      {"aten::binary_cross_entropy", BinaryCrossEntropy},
      {"aten::binary_cross_entropy_backward", Like<1>},
      {"aten::native_dropout", Dropout},
      {"aten::native_dropout_backward", Broadcast<0, 1>},
      {"aten::where.self", Where},
      {"aten::max", ScalarLike},
      {"aten::min", ScalarLike},
      {"aten::median", ScalarLike},
      {"aten::dot", ScalarLike},
      {"aten::vdot", ScalarLike},
      {"aten::trace", ScalarLike},
      {"aten::prod", Product},
      {"aten::nansum", NanSum},
      {"aten::std.correction", Variance},
      {"aten::var.correction", Variance},
      {"aten::std_mean.correction", VarianceAndMean},
      {"aten::var_mean.correction", VarianceAndMean},
      {"aten::floor_divide", Broadcast<0, 1>},
      {"aten::index_select", IndexSelect},
      {"aten::multinomial", Multinomial},
  };
}

}  // namespace

ShapeRule FindShapeRule(const std::string& name) {
  static const auto* const rules = [] {
    auto* all = new absl::flat_hash_map<std::string, ShapeRule>;
    for (const ShapeRules& rules : {ElementwiseRules(), LayerShapeRules()}) {
      all->insert(rules.begin(), rules.end());
    }
    return all;
  }();
  const auto found = rules->find(name);
  return found == rules->end() ? nullptr : found->second;
}

}  // namespace tessera
