// The figures are those of libtorch's kernels (aten/src/ATen/native) and of
// oneDNN below them, read off their allocations; where oneDNN chooses among
// implementations by the processor, those of AVX-512. A processor without them
// convolves 16-bit numbers by libtorch's own kernels.
#include "sharding/trace/operators/kernel_memory.h"

#include <algorithm>

#include "ATen/Parallel.h"
#include "ATen/core/dispatch/Dispatcher.h"
#include "absl/container/flat_hash_map.h"
#include "c10/core/impl/LocalDispatchKeySet.h"

namespace tessera {
namespace {

using Args = OperatorArguments;
using Results = OperatorResults;

int64_t BytesOf(const at::Tensor& t) {
  return t.defined() ? t.numel() * static_cast<int64_t>(t.itemsize()) : 0;
}

int64_t BytesOf(const Results& results) {
  int64_t bytes = 0;
  for (const c10::IValue& value : results) {
    if (value.isTensor()) bytes += BytesOf(value.toTensor());
  }
  return bytes;
}

// ---- convolutions: copies of what is read and written, channels in blocks

constexpr int64_t kBlock = 16;  // channels

int64_t Blocked(int64_t channels) {
  return (channels + kBlock - 1) / kBlock * kBlock;
}

// Images, whose channels are dim 1; those of few channels are read as they are.
int64_t BlockedImages(const at::Tensor& t) {
  constexpr int64_t kFewChannels = 3;
  const int64_t channels = std::max<int64_t>(t.size(1), 1);
  if (channels <= kFewChannels) return 0;
  return BytesOf(t) / channels * Blocked(channels);
}

int64_t BlockedWeight(const at::Tensor& t) {
  const int64_t in = std::max<int64_t>(t.size(1), 1);
  const int64_t out = std::max<int64_t>(t.size(0), 1);
  return BytesOf(t) / out / in * Blocked(out) * (in <= 3 ? in : Blocked(in));
}

// A result whose layout is not the blocked one is copied once more: that of
// 16-bit numbers, of strides, of transposed convolutions.
int64_t Copies(const at::Tensor& t, at::IntArrayRef stride, bool transposed) {
  const bool strided = std::any_of(stride.begin(), stride.end(),
                                   [](int64_t s) { return s > 1; });
  return transposed || strided || at::isReducedFloatingType(t.scalar_type())
             ? 3
             : 2;
}

int64_t BlockedResult(const at::Tensor& t) {
  const int64_t channels = std::max<int64_t>(t.size(1), 1);
  return BytesOf(t) / channels * Blocked(channels);
}

// Whether oneDNN has kernels of 16-bit numbers here: asked of libtorch.
bool AskOneDnn(const char* op) {
  const c10::impl::ForceDispatchKeyGuard nothing_watches({}, {});
  torch::jit::Stack stack;
  c10::Dispatcher::singleton().findSchemaOrThrow(op, "").callBoxed(stack);
  return stack.at(0).toBool();
}
bool IsOneDnns(at::ScalarType type) {
  static const bool bfloat16 = AskOneDnn("mkldnn::_is_mkldnn_bf16_supported");
  static const bool half = AskOneDnn("mkldnn::_is_mkldnn_fp16_supported");
  return type == at::kBFloat16 ? bfloat16 : type != at::kHalf || half;
}

bool AreAll(const std::vector<int64_t>& values, int64_t wanted) {
  return std::all_of(values.begin(), values.end(),
                     [wanted](int64_t v) { return v == wanted; });
}

// libtorch's own kernels multiply matrices: in the columns of one lies what
// each window of the images reads, of all images at once or of one. Groups are
// convolved one by one, each reading a copy of its channels.
struct ColumnKernels {
  at::Tensor weight;
  at::Tensor windows;   // one of its places for each window: the result's, or,
                        // transposed, the input's
  bool dilated, plain;  // plain: an image is its own columns
  int64_t groups;

  int64_t Columns(bool all_images) const {
    if (plain || windows.numel() == 0 || weight.numel() == 0) return 0;
    const int64_t image = BytesOf(windows) / windows.size(0) / windows.size(1);
    return image * (weight.numel() / weight.size(0)) *
           (all_images && !dilated ? windows.size(0) : 1);
  }
};

ColumnKernels ColumnsOf(const at::Tensor& weight, const at::Tensor& windows,
                        const Args& args, size_t stride) {
  const bool is_point =
      std::all_of(weight.sizes().begin() + 2, weight.sizes().end(),
                  [](int64_t size) { return size == 1; });
  return {weight, windows, !AreAll(args.integers(stride + 2), 1),
          is_point && !args.boolean(stride + 3) &&
              AreAll(args.integers(stride), 1) &&
              AreAll(args.integers(stride + 1), 0),
          args.integer(stride + 5)};
}

int64_t ColumnConvolution(const Args& args, const at::Tensor& input,
                          const at::Tensor& out) {
  const bool transposed = args.boolean(6);
  const ColumnKernels kernels =
      ColumnsOf(args.tensor(1), transposed ? input : out, args, 3);
  const int64_t columns = kernels.Columns(!transposed || input.dim() <= 4);
  if (kernels.groups == 1) return columns;
  // The groups' results are put together at the end.
  return std::max(BytesOf(out), columns + BytesOf(input) / kernels.groups);
}

int64_t ColumnConvolutionBackward(const Args& args, const Results& results) {
  const at::Tensor grad = args.tensor(0), input = args.tensor(1);
  const bool transposed = args.boolean(7);
  const ColumnKernels kernels =
      ColumnsOf(args.tensor(2), transposed ? input : grad, args, 4);
  const auto mask = args[10].toBoolList();
  const bool takes = mask[1] || (mask[0] && input.dim() == 5);
  const int64_t columns = takes ? kernels.Columns(!transposed) : 0;
  if (kernels.groups == 1) return columns;
  return std::max(BytesOf(results),
                  columns + (BytesOf(grad) + BytesOf(input)) / kernels.groups);
}

// Results are counted besides, here as everywhere.
int64_t Convolution(const Args& args, const Results& results) {
  const at::Tensor out = results[0].toTensor();
  const at::Tensor input = args.tensor(0);
  if (input.dim() != args.tensor(1).dim()) return 0;
  if (!IsOneDnns(input.scalar_type())) {
    return ColumnConvolution(args, input, out);
  }
  const int64_t reads = BlockedImages(input) + BlockedWeight(args.tensor(1));
  const int64_t writes = BlockedResult(out);
  const bool again =
      args.boolean(6) || at::isReducedFloatingType(input.scalar_type());
  return std::max(reads + writes, writes + (again ? 2 : 1) * BytesOf(out)) -
         BytesOf(out);
}

int64_t ConvolutionBackward(const Args& args, const Results& results) {
  const at::Tensor grad = args.tensor(0), input = args.tensor(1),
                   weight = args.tensor(2);
  if (!IsOneDnns(input.scalar_type())) {
    return ColumnConvolutionBackward(args, results);
  }
  const auto mask = args[10].toBoolList();
  const int64_t weights = BlockedWeight(weight);
  const int64_t of_input = mask[0] ? BytesOf(input) : 0;
  int64_t most = 0;
  if (mask[0]) {
    most = std::max(
        BlockedResult(grad) + weights + BlockedResult(input),
        Copies(input, args.integers(4), args.boolean(7)) * BytesOf(input));
  }
  if (mask[1]) {
    // Each thread may add up the weights' gradients in memory of its own.
    const int64_t sums = weights <= (256 << 10) ? weights : 0;
    most = std::max(most, of_input + BlockedResult(grad) +
                              BlockedImages(input) + weights + sums);
    most = std::max(most, of_input + 2 * BytesOf(weight));
  }
  return std::max<int64_t>(0, most - BytesOf(results));
}

// ---- attention: FlashAttentionKernel.cpp

struct FlashBlocks {
  FlashBlocks(int64_t queries, int64_t keys)
      : query(std::min<int64_t>(queries, queries >= 768   ? 256
                                         : queries >= 192 ? 64
                                                          : 32)),
        key(std::min<int64_t>(keys, 512)) {}
  int64_t query, key;
};

int64_t FlashAttention(const Args& args, const Results&) {
  constexpr int64_t kFloat = 4;
  const at::Tensor q = args.tensor(0), k = args.tensor(1);
  const FlashBlocks block(q.size(2), k.size(2));
  const int64_t threads = at::get_num_threads(), dim = q.size(3);
  int64_t bytes =
      threads * kFloat *
      (block.query * block.key + 2 * block.query + block.query * dim);
  if (!at::isReducedFloatingType(q.scalar_type())) return bytes;
  const auto item = static_cast<int64_t>(q.itemsize());
  bytes += threads * item * block.query * block.key;
  // Keys and values are packed where every thread reads them often enough.
  const int64_t slices =
      q.size(0) * q.size(1) * ((q.size(2) + block.query - 1) / block.query);
  const int64_t of_thread = (slices + threads - 1) / threads;
  if (of_thread * block.query >= 4 * q.size(0) * q.size(1)) {
    bytes += BytesOf(k) + BytesOf(args.tensor(2)) +
             2 * threads * item * block.query * dim;
  }
  return bytes;
}

int64_t FlashAttentionBackward(const Args& args, const Results&) {
  constexpr int64_t kFloat = 4;
  const at::Tensor grad = args.tensor(0), q = args.tensor(1);
  const FlashBlocks block(q.size(2), args.tensor(2).size(2));
  const int64_t scores = 2 * at::get_num_threads() * block.query * block.key;
  int64_t bytes = scores * kFloat;
  if (at::isReducedFloatingType(q.scalar_type())) {
    bytes += scores * static_cast<int64_t>(q.itemsize());
  }
  if (grad.stride(-1) != 1) bytes += BytesOf(grad);
  return bytes;
}

// ---- others

int64_t LayerNormBackward(const Args& args, const Results&) {
  int64_t numel = 1;
  for (const int64_t size : args.integers(2)) numel *= size;
  return 2 * at::get_num_threads() * numel * 4;
}

// (grad, input, ...): the input's gradient is made twice where both have the
// same layout, and also in float32 where they do not.
int64_t BatchNormBackward(const Args& args, const Results& results) {
  const at::Tensor grad = args.tensor(0), input = args.tensor(1);
  if (!results[0].toTensor().defined()) return 0;
  const at::MemoryFormat format = input.suggest_memory_format();
  if (grad.suggest_memory_format() == format && grad.is_contiguous(format) &&
      input.is_contiguous(format)) {
    return (input.dim() == 2 ? 2 : 1) * BytesOf(input);
  }
  return at::isReducedFloatingType(input.scalar_type()) ? 2 * BytesOf(input)
                                                        : 0;
}

// (grad, indices, offsets, ...): of each index its bag, and all sorted.
int64_t EmbeddingBagBackward(const Args& args, const Results&) {
  const at::Tensor grad = args.tensor(0);
  return 4 * BytesOf(args.tensor(1)) + 8 +
         (grad.is_contiguous() ? 0 : BytesOf(grad));
}

// Weights packed, the sum of both biases, and the gates of all steps.
int64_t Recurrent(const at::Tensor& input, const at::Tensor& weight_in,
                  const at::Tensor& weight_hidden) {
  const int64_t gates = weight_hidden.size(0), hidden = weight_hidden.size(1);
  const auto item = static_cast<int64_t>(input.itemsize());
  const int64_t weights = BytesOf(weight_in) + BytesOf(weight_hidden);
  return weights / 32 * 33 + gates * item +
         (input.size(0) * gates + 6 * hidden) * input.size(1) * item;
}
int64_t RecurrentForward(const Args& args, const Results&) {
  return Recurrent(args.tensor(0), args.tensor(1), args.tensor(2));
}

int64_t Interpolation(const Args& args, const Results& results) {
  return BytesOf(args.tensor(0)) + BytesOf(results);
}

using Memory = int64_t (*)(const Args& args, const Results& results);

}  // namespace

int64_t KernelMemory(const std::string& name, const Args& args,
                     const Results& results) {
  static const auto* const table = new absl::flat_hash_map<std::string, Memory>{
      {"aten::convolution", Convolution},
      {"aten::convolution_backward", ConvolutionBackward},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", FlashAttention},
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward",
       FlashAttentionBackward},
      {"aten::native_layer_norm_backward", LayerNormBackward},
      {"aten::native_batch_norm_backward", BatchNormBackward},
      {"aten::_embedding_bag_backward", EmbeddingBagBackward},
      {"aten::mkldnn_rnn_layer", RecurrentForward},
      {"aten::mkldnn_rnn_layer_backward", RecurrentForward},
      {"aten::upsample_bilinear2d", Interpolation},
  };
  const auto found = table->find(name);
  return found == table->end() ? 0 : found->second(args, results);
}

}  // namespace tessera
