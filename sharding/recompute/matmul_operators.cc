#include "sharding/recompute/matmul_operators.h"

#include "absl/container/flat_hash_set.h"

namespace tessera {

bool IsMatmulOrAttention(absl::string_view op) {
  static const auto* const names = new absl::flat_hash_set<absl::string_view>{
      "aten::mm",
      "aten::addmm",
      "aten::_addmm_activation",
      "aten::bmm",
      "aten::baddbmm",
      "aten::addbmm",
      "aten::mv",
      "aten::addmv",
      "aten::dot",
      "aten::_trilinear",
      "aten::_scaled_mm",
      "aten::_grouped_mm",
      "aten::convolution",
      "aten::convolution_overrideable",
      "aten::mkldnn_rnn_layer",
      "aten::_cudnn_rnn",
      "aten::_scaled_dot_product_flash_attention_for_cpu",
      "aten::_scaled_dot_product_flash_attention",
      "aten::_scaled_dot_product_efficient_attention",
      "aten::_scaled_dot_product_cudnn_attention",
      "aten::_scaled_dot_product_fused_attention_overrideable",
      "aten::_flash_attention_forward",
      "aten::_efficient_attention_forward"};
  return names->contains(op);
}

}  // namespace tessera
