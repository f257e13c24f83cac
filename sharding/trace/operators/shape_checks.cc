#include "sharding/trace/operators/shape_checks.h"

#include <algorithm>

#include "ATen/Functions.h"
#include "ATen/native/layer_norm.h"

namespace tessera {
namespace {

using Args = OperatorArguments;

bool AllAtLeast(const std::vector<int64_t>& list, int64_t least) {
  return std::all_of(list.begin(), list.end(),
                     [&](int64_t v) { return v >= least; });
}

void CheckList(const char* name, const std::vector<int64_t>& list,
               int64_t dims) {
  const auto size = static_cast<int64_t>(list.size());
  TORCH_CHECK(size == 1 || size == dims, "expected ", name,
              " to be a single integer value or a list of ", dims,
              " values to match the convolution dimensions, but got ", name,
              "=", at::IntArrayRef(list));
}

// Checks the channels of input and weight; `weight` is [out, in / groups, ...],
// or transposed [in, out / groups, ...].
void CheckChannels(const at::Tensor& input, const at::Tensor& weight,
                   const at::Tensor& bias, bool transposed, int64_t groups) {
  TORCH_CHECK(groups > 0,
              "expected groups to be greater than 0, but got groups=", groups);
  TORCH_CHECK(weight.size(0) >= groups && weight.size(0) % groups == 0,
              "Given groups=", groups, ", expected weight to be divisible by ",
              groups, " at dimension 0, but got weight of size ",
              weight.sizes(), " instead");
  const int64_t in = transposed ? weight.size(0) : weight.size(1) * groups;
  TORCH_CHECK(input.size(1) == in, "Given ",
              transposed ? "transposed=1" : "groups=",
              transposed ? "" : std::to_string(groups), ", weight of size ",
              weight.sizes(), ", expected input", input.sizes(), " to have ",
              in, " channels, but got ", input.size(1), " channels instead");
  const int64_t out = transposed ? weight.size(1) * groups : weight.size(0);
  TORCH_CHECK(!bias.defined() || (bias.dim() == 1 && bias.size(0) == out),
              "Given weight of size ", weight.sizes(),
              ", expected bias to be 1-dimensional with ", out,
              " elements, but got bias of size ", bias.sizes(), " instead");
}

void CheckChannelVector(const char* name, const at::Tensor& t,
                        int64_t channels) {
  TORCH_CHECK(!t.defined() || t.numel() == channels, name, " should contain ",
              channels, " elements not ", t.numel());
}

}  // namespace

// (input, weight, bias, stride, padding, dilation, transposed, output_padding,
// groups)
void CheckConvolution(const Args& args) {
  const at::Tensor input = args.tensor(0), weight = args.tensor(1);
  const auto stride = args.integers(3), padding = args.integers(4),
             dilation = args.integers(5), output_padding = args.integers(7);
  const int64_t rank = weight.dim();
  TORCH_CHECK(rank >= 3, "weight should have at least three dimensions");
  TORCH_CHECK(input.dim() == rank, "Expected ", rank, "-dimensional input for ",
              rank, "-dimensional weight ", weight.sizes(), ", but got ",
              input.dim(), "-dimensional input of size ", input.sizes(),
              " instead");
  TORCH_CHECK(input.scalar_type() == weight.scalar_type(), "Input type (",
              input.scalar_type(), ") and weight type (", weight.scalar_type(),
              ") should be the same");
  CheckList("stride", stride, rank - 2);
  CheckList("padding", padding, rank - 2);
  CheckList("dilation", dilation, rank - 2);
  CheckList("output_padding", output_padding, rank - 2);
  TORCH_CHECK(AllAtLeast(padding, 0), "negative padding is not supported");
  TORCH_CHECK(AllAtLeast(output_padding, 0),
              "negative output_padding is not supported");
  TORCH_CHECK(AllAtLeast(stride, 1), "non-positive stride is not supported");
  TORCH_CHECK(AllAtLeast(dilation, 1),
              "non-positive dilation is not supported");
  const bool transposed = args.boolean(6);
  CheckChannels(input, weight, args.tensor(2), transposed, args.integer(8));
  const std::vector<int64_t> sizes = ConvolutionSizes(args);
  TORCH_CHECK(AllAtLeast({sizes.begin() + 2, sizes.end()}, transposed ? 0 : 1),
              "Kernel size can't be greater than actual input size: input of "
              "size ",
              input.sizes(), " padded by ", at::IntArrayRef(padding),
              ", weight of size ", weight.sizes());
}

// (input, normalized_shape, weight, bias, eps)
void CheckLayerNorm(const Args& args) {
  at::native::_check_layer_norm_inputs(args.tensor(0), args.integers(1),
                                       args.tensor(2), args.tensor(3));
}

// (input, weight, bias, N, C, HxW, group, eps)
void CheckGroupNorm(const Args& args) {
  const at::Tensor input = args.tensor(0);
  const int64_t channels = args.integer(4), groups = args.integer(6);
  TORCH_CHECK(groups > 0, "Expected num groups to be greater than 0, got ",
              groups);
  TORCH_CHECK(channels % groups == 0,
              "Expected number of channels in input to be divisible by "
              "num_groups, but got input of shape ",
              input.sizes(), " and num_groups=", groups);
  for (const size_t i : {1, 2}) {
    const at::Tensor t = args.tensor(i);
    TORCH_CHECK(!t.defined() || (t.dim() == 1 && t.numel() == channels),
                "Expected ", i == 1 ? "weight" : "bias",
                " to be a vector of size equal to the number of channels in "
                "input, but got ",
                i == 1 ? "weight" : "bias", " of shape ", t.sizes(),
                " and input of shape ", input.sizes());
  }
}

// (input, weight, bias, running_mean, running_var, training, momentum, eps)
void CheckBatchNorm(const Args& args) {
  const at::Tensor input = args.tensor(0);
  TORCH_CHECK(input.dim() >= 2,
              "Expected input of batch norm to have at least "
              "two dimensions, but got input of size ",
              input.sizes());
  const int64_t channels = input.size(1);
  CheckChannelVector("weight", args.tensor(1), channels);
  CheckChannelVector("bias", args.tensor(2), channels);
  CheckChannelVector("running_mean", args.tensor(3), channels);
  CheckChannelVector("running_var", args.tensor(4), channels);
}

}  // namespace tessera
