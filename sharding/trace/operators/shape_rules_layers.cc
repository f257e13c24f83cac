// Shape rules of what layers are made of: norms, convolutions, attention,
// embeddings, pooling, recurrent layers. The forms of the results are those of
// libtorch's CPU kernels (aten/src/ATen/native), which the comments name.
#include <algorithm>

#include "ATen/Functions.h"
#include "ATen/OpMathType.h"
#include "sharding/trace/operators/shape_checks.h"
#include "sharding/trace/operators/shape_rules.h"

namespace tessera {
namespace {

using Args = OperatorArguments;
using Results = OperatorResults;

at::Tensor Contiguous(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::empty(sizes, options);
}

// What statistics are of: float32 where 16-bit inputs meet float32 parameters
// (mixed), the input's otherwise.
at::TensorOptions StatisticOptions(const at::Tensor& input,
                                   const at::Tensor& parameter) {
  const bool mixed = at::isReducedFloatingType(input.scalar_type()) &&
                     parameter.defined() &&
                     parameter.scalar_type() == at::kFloat;
  return input.options().dtype(mixed ? at::kFloat : input.scalar_type());
}

at::Tensor ContiguousLike(const at::Tensor& t) {
  return at::empty_like(t, at::MemoryFormat::Contiguous);
}

at::Tensor If(bool wanted, const at::Tensor& t) {
  return wanted ? t : at::Tensor();
}

// ---- norms

// Returns the result of a norm and its two statistics.
Results NormResults(const at::Tensor& result, at::IntArrayRef sizes,
                    const at::TensorOptions& options) {
  return {result, Contiguous(sizes, options), Contiguous(sizes, options)};
}

// Returns the gradients of a norm whose weight and bias have `channels`.
Results NormGradients(const at::Tensor& input, const at::Tensor& weight,
                      int64_t channels, const c10::List<bool>& mask) {
  const at::TensorOptions options =
      weight.defined() ? weight.options() : input.options();
  return {If(mask[0], at::empty_like(input, input.suggest_memory_format())),
          If(mask[1], Contiguous({channels}, options)),
          If(mask[2], Contiguous({channels}, options))};
}

Results LayerNorm(const Args& args) {
  CheckLayerNorm(args);
  const at::Tensor input = args.tensor(0);
  const auto normalized = args.integers(1).size();
  std::vector<int64_t> sizes = input.sizes().vec();
  std::fill(sizes.end() - static_cast<int64_t>(normalized), sizes.end(), 1);
  return NormResults(ContiguousLike(input), sizes,
                     StatisticOptions(input, args.tensor(2)));
}

// (grad, input, normalized_shape, mean, rstd, weight, bias, output_mask)
Results LayerNormBackward(const Args& args) {
  const at::Tensor input = args.tensor(1), weight = args.tensor(5),
                   bias = args.tensor(6);
  const auto mask = args[7].toBoolList();
  return {If(mask[0], ContiguousLike(input)),
          mask[1] && weight.defined() ? ContiguousLike(weight) : at::Tensor(),
          mask[2] && bias.defined() ? ContiguousLike(bias) : at::Tensor()};
}

// (input, weight, bias, N, C, HxW, group, eps)
Results GroupNorm(const Args& args) {
  CheckGroupNorm(args);
  const at::Tensor input = args.tensor(0);
  return NormResults(at::empty_like(input, input.suggest_memory_format()),
                     {args.integer(3), args.integer(6)},
                     StatisticOptions(input, args.tensor(1)));
}

// (grad, input, mean, rstd, weight, N, C, HxW, group, output_mask)
Results GroupNormBackward(const Args& args) {
  return NormGradients(args.tensor(1), args.tensor(4), args.integer(6),
                       args[9].toBoolList());
}

// (input, weight, bias, running_mean, running_var, training, momentum, eps)
Results BatchNorm(const Args& args) {
  CheckBatchNorm(args);
  const at::Tensor input = args.tensor(0);
  return NormResults(at::empty_like(input, input.suggest_memory_format()),
                     {args.boolean(5) ? input.size(1) : 0},
                     StatisticOptions(input, args.tensor(1)));
}

// (grad, input, weight, running_mean, running_var, save_mean, save_invstd,
// train, eps, output_mask)
Results BatchNormBackward(const Args& args) {
  return NormGradients(args.tensor(1), args.tensor(2), args.tensor(1).size(1),
                       args[9].toBoolList());
}

// ---- convolutions

at::MemoryFormat ConvolutionFormat(const at::Tensor& input,
                                   const at::Tensor& weight) {
  for (const at::Tensor& t : {input, weight}) {
    const auto format = t.suggest_memory_format();
    if (format != at::MemoryFormat::Contiguous) return format;
  }
  return at::MemoryFormat::Contiguous;
}

Results Convolution(const Args& args) {
  CheckConvolution(args);
  const at::Tensor input = args.tensor(0);
  return {at::empty(
      ConvolutionSizes(args),
      input.options().memory_format(ConvolutionFormat(input, args.tensor(1))))};
}

// (grad, input, weight, bias_sizes, stride, padding, dilation, transposed,
// output_padding, groups, output_mask)
Results ConvolutionBackward(const Args& args) {
  const at::Tensor grad = args.tensor(0), input = args.tensor(1),
                   weight = args.tensor(2);
  const auto mask = args[10].toBoolList();
  const auto format = ConvolutionFormat(input, weight);
  return {
      If(mask[0], at::empty_like(input, format)),
      If(mask[1], at::empty_like(weight, format)),
      If(mask[2], Contiguous({args.boolean(7) ? weight.size(1) * args.integer(9)
                                              : weight.size(0)},
                             weight.options()))};
}

// ---- attention

// (query, key, value, dropout_p, is_causal, *, attn_mask, scale):
// FlashAttentionKernel.cpp works on [batch, length, heads, dim].
Results FlashAttention(const Args& args) {
  const at::Tensor q = args.tensor(0);
  const auto options = q.options().dtype(at::toOpMathType(q.scalar_type()));
  return {
      at::empty_like(q.transpose(1, 2)).transpose(1, 2),
      Contiguous({q.size(0), q.size(2), q.size(1)}, options).transpose(1, 2)};
}

// (grad_out, query, key, value, out, logsumexp, ...)
Results FlashAttentionBackward(const Args& args) {
  const auto zeros = [&](size_t i) {
    const at::Tensor t = args.tensor(i).transpose(1, 2);
    return at::empty(t.sizes(), t.options()).transpose(1, 2);
  };
  return {zeros(1), zeros(2), zeros(3)};
}

// ---- embeddings

// (grad, indices, num_weights, padding_idx, scale_grad_by_freq)
Results EmbeddingBackward(const Args& args) {
  const at::Tensor grad = args.tensor(0);
  return {Contiguous({args.integer(2), grad.size(-1)}, grad.options())};
}

// (weight, indices, offsets, scale_grad_by_freq, mode, sparse,
// per_sample_weights, include_last_offset, padding_idx). Sums keep no
// offset2bag, where the fast way is taken; EmbeddingBag.cpp.
Results EmbeddingBag(const Args& args) {
  const at::Tensor weight = args.tensor(0), indices = args.tensor(1),
                   offsets = args.tensor(2);
  const int64_t mode = args.integer(4);
  const int64_t last = args.boolean(7) && offsets.size(0) > 0 ? 1 : 0;
  const int64_t bags = offsets.size(0) - last;
  const auto numbers = offsets.options();
  const bool fast = mode == 0 && weight.stride(1) == 1 &&
                    (weight.scalar_type() == at::kFloat ||
                     at::isReducedFloatingType(weight.scalar_type())) &&
                    args.integer(8) < 0;
  // Made one longer, and cut.
  const at::Tensor of_index = fast ? Contiguous({0}, numbers)
                                   : Contiguous({indices.size(0) + 1}, numbers)
                                         .narrow(0, 0, indices.size(0));
  return {Contiguous({bags, weight.size(1)}, weight.options()), of_index,
          Contiguous({bags + last}, numbers).narrow(0, 0, bags),
          mode == 2 ? Contiguous({bags, weight.size(1)}, numbers)
                    : Contiguous({bags}, numbers)};
}

// (grad, indices, offset2bag, bag_size, maximum_indices, num_weights, ...)
Results EmbeddingBagDenseBackward(const Args& args) {
  const at::Tensor grad = args.tensor(0);
  return {Contiguous({args.integer(5), grad.size(1)}, grad.options())};
}

// ---- recurrent layers: mkldnn_rnn_layer

// (input, weight_ih, weight_hh, bias_ih, bias_hh, hx, cx, ...). What is kept
// for backward is oneDNN's own: the gates and eleven arrays of states, six of
// them as wide as the wider of input and state, in whole pages.
Results Recurrent(const Args& args) {
  constexpr int64_t kPage = 4096;
  const at::Tensor input = args.tensor(0), state = args.tensor(5);
  const int64_t steps = input.size(0), batch = input.size(1);
  const int64_t in = input.size(2), hidden = args.integer(10);
  const int64_t numel =
      4 * steps * batch * hidden +
      (steps + 1) * batch * (6 * std::max(in, hidden) + 5 * hidden);
  const int64_t bytes = numel * static_cast<int64_t>(input.itemsize());
  return {Contiguous({steps, batch, hidden}, input.options()),
          at::empty_like(state), at::empty_like(args.tensor(6)),
          Contiguous({(bytes / kPage + 4) * kPage},
                     input.options().dtype(at::kByte))};
}

// (input, weight_ih, weight_hh, bias_ih, bias_hh, hx, cx, ...)
Results RecurrentBackward(const Args& args) {
  const at::Tensor bias = at::empty_like(args.tensor(3));
  return {ContiguousLike(args.tensor(0)),
          ContiguousLike(args.tensor(1)),
          ContiguousLike(args.tensor(2)),
          bias,
          bias,
          at::empty_like(args.tensor(5)),
          at::empty_like(args.tensor(6))};
}

// ---- pooling

Results AdaptivePool(const Args& args) {
  const at::Tensor input = args.tensor(0);
  const auto out = args.integers(1);
  std::vector<int64_t> sizes = input.sizes().vec();
  std::copy(out.rbegin(), out.rend(), sizes.rbegin());
  return {at::empty(
      sizes, input.options().memory_format(input.suggest_memory_format()))};
}
Results AdaptivePoolBackward(const Args& args) {
  const at::Tensor input = args.tensor(1);
  return {at::empty_like(input, input.suggest_memory_format())};
}

// ---- losses over pixels

// (self, target, weight, reduction, ignore_index)
Results NllLoss2d(const Args& args) {
  const at::Tensor self = args.tensor(0);
  const auto scalar = at::empty({}, self.options());
  if (args.integer(3) != 0) return {scalar, at::empty({}, self.options())};
  return {
      Contiguous({self.size(0), self.size(2), self.size(3)}, self.options()),
      scalar};
}
Results NllLoss2dBackward(const Args& args) {
  return {ContiguousLike(args.tensor(1))};
}

// ---- weight norm

// (v, g, dim)
Results WeightNorm(const Args& args) {
  const at::Tensor v = args.tensor(0), g = args.tensor(1);
  const auto dtype =
      g.scalar_type() == at::kBFloat16 ? at::kFloat : g.scalar_type();
  return {ContiguousLike(v),
          at::empty_strided(g.sizes(), g.strides(), g.options().dtype(dtype))};
}
// (grad, saved_v, saved_g, saved_norms, dim)
Results WeightNormBackward(const Args& args) {
  return {ContiguousLike(args.tensor(1)), ContiguousLike(args.tensor(2))};
}

}  // namespace

std::vector<int64_t> ConvolutionSizes(const OperatorArguments& args) {
  const at::Tensor input = args.tensor(0), weight = args.tensor(1);
  const auto stride = args.integers(3), padding = args.integers(4),
             dilation = args.integers(5), output_padding = args.integers(7);
  const bool transposed = args.boolean(6);
  const auto of = [](const std::vector<int64_t>& list, size_t i) {
    return list.size() == 1 ? list[0] : list[i];
  };
  const size_t dims = static_cast<size_t>(weight.dim()) - 2;
  std::vector<int64_t> sizes;
  if (input.dim() == weight.dim()) sizes.push_back(input.size(0));
  sizes.push_back(transposed ? weight.size(1) * args.integer(8)
                             : weight.size(0));
  const int64_t first = static_cast<int64_t>(sizes.size());
  for (size_t i = 0; i < dims; ++i) {
    const int64_t in = input.size(first + static_cast<int64_t>(i));
    const int64_t reach =
        of(dilation, i) * (weight.size(static_cast<int64_t>(i) + 2) - 1);
    sizes.push_back(
        transposed ? (in - 1) * of(stride, i) - 2 * of(padding, i) + reach + 1 +
                         of(output_padding, i)
                   : (in + 2 * of(padding, i) - reach - 1) / of(stride, i) + 1);
  }
  return sizes;
}

ShapeRules LayerShapeRules() {
  return {
      {"aten::native_layer_norm", LayerNorm},
      {"aten::native_layer_norm_backward", LayerNormBackward},
      {"aten::native_group_norm", GroupNorm},
      {"aten::native_group_norm_backward", GroupNormBackward},
      {"aten::native_batch_norm", BatchNorm},
      {"aten::native_batch_norm_backward", BatchNormBackward},
      {"aten::convolution", Convolution},
      {"aten::convolution_backward", ConvolutionBackward},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", FlashAttention},
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward",
       FlashAttentionBackward},
      {"aten::embedding_dense_backward", EmbeddingBackward},
      {"aten::_embedding_bag", EmbeddingBag},
      {"aten::_embedding_bag_forward_only", EmbeddingBag},
      {"aten::_embedding_bag_dense_backward", EmbeddingBagDenseBackward},
      {"aten::mkldnn_rnn_layer if large", Recurrent},
      {"aten::mkldnn_rnn_layer_backward if large", RecurrentBackward},
      {"aten::_adaptive_avg_pool2d", AdaptivePool},
      {"aten::_adaptive_avg_pool3d", AdaptivePool},
      {"aten::_adaptive_avg_pool2d_backward", AdaptivePoolBackward},
      {"aten::_adaptive_avg_pool3d_backward", AdaptivePoolBackward},
      {"aten::nll_loss2d_forward", NllLoss2d},
      {"aten::nll_loss2d_backward", NllLoss2dBackward},
      {"aten::_weight_norm_interface", WeightNorm},
      {"aten::_weight_norm_interface_backward", WeightNormBackward},
  };
}

}  // namespace tessera
