#include "sharding/trace/operators/operator_flops.h"

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"

namespace tessera {
namespace {

using Args = OperatorArguments;
using Results = OperatorResults;
using Flops = int64_t (*)(const Args& args, const Results& results);

// [.., m, k] x [.., k, n], of arguments A and A + 1.
template <size_t A>
int64_t Product(const Args& args, const Results&) {
  return 2 * args.tensor(A).numel() * args.tensor(A + 1).size(-1);
}
template <size_t A>
int64_t ProductWithVector(const Args& args, const Results&) {
  return 2 * args.tensor(A).numel();
}

int64_t ConvolutionFlops(const Args& args, const Results& results) {
  const at::Tensor weight = args.tensor(1);
  const at::Tensor& over =
      args.boolean(6) ? args.tensor(0) : results[0].toTensor();
  return 2 * over.numel() / over.size(1) * weight.numel();
}

int64_t ConvolutionBackwardFlops(const Args& args, const Results&) {
  const at::Tensor weight = args.tensor(2);
  const at::Tensor over = args.boolean(7) ? args.tensor(1) : args.tensor(0);
  const auto mask = args[10].toBoolList();
  return (int64_t{mask[0]} + int64_t{mask[1]}) * 2 * over.numel() /
         over.size(1) * weight.numel();
}

// Products of [length, dim] and [dim, keys], `products` of them.
int64_t AttentionProducts(const at::Tensor& query, const at::Tensor& key,
                          int64_t products) {
  return 2 * products * query.numel() * key.size(2);
}
int64_t Attention(const Args& args, const Results&) {
  return AttentionProducts(args.tensor(0), args.tensor(1), 2);
}
int64_t AttentionBackward(const Args& args, const Results&) {
  return AttentionProducts(args.tensor(1), args.tensor(2), 5);
}

int64_t BytesIn(const c10::IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& t = value.toTensor();
    return t.defined() ? static_cast<int64_t>(t.nbytes()) : 0;
  }
  int64_t bytes = 0;
  if (value.isTensorList()) {
    for (const at::Tensor& t : value.toTensorVector()) {
      bytes += static_cast<int64_t>(t.nbytes());
    }
  }
  return bytes;
}

using FlopsTable = absl::flat_hash_map<std::string, Flops>;

const FlopsTable& TheFlopsTable() {
  static const auto* const table = new FlopsTable{
      {"aten::mm", Product<0>},
      {"aten::bmm", Product<0>},
      {"aten::_scaled_mm", Product<0>},
      {"aten::addmm", Product<1>},
      {"aten::addmm_", Product<1>},
      {"aten::_addmm_activation", Product<1>},
      {"aten::baddbmm", Product<1>},
      {"aten::baddbmm_", Product<1>},
      {"aten::dot", ProductWithVector<0>},
      {"aten::mv", ProductWithVector<0>},
      {"aten::addmv", ProductWithVector<1>},
      {"aten::addmv_", ProductWithVector<1>},
      {"aten::convolution", ConvolutionFlops},
      {"aten::convolution_backward", ConvolutionBackwardFlops},
      {"aten::_scaled_dot_product_flash_attention", Attention},
      {"aten::_scaled_dot_product_efficient_attention", Attention},
      {"aten::_scaled_dot_product_cudnn_attention", Attention},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", Attention},
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward",
       AttentionBackward},
  };
  return *table;
}

}  // namespace

bool HasOperatorFlops(const std::string& name) {
  return TheFlopsTable().contains(name);
}

int64_t OperatorFlops(const std::string& name, const Args& args,
                      const Results& results) {
  const auto found = TheFlopsTable().find(name);
  return found == TheFlopsTable().end() ? 0 : found->second(args, results);
}

int64_t OperatorMovedBytes(const std::string& name, const Args& args,
                           const Results& results) {
  static const auto* const lookups = new absl::flat_hash_set<std::string>{
      "aten::embedding", "aten::index_select", "aten::index.Tensor",
      "aten::gather"};
  int64_t bytes = 0;
  for (const c10::IValue& result : results) bytes += BytesIn(result);
  if (lookups->contains(name)) return 2 * bytes;
  for (size_t i = 0; i < args.count(); ++i) bytes += BytesIn(args[i]);
  return bytes;
}

}  // namespace tessera
