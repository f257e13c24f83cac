#include "sharding/recompute/matmul_operators.h"

#include "base/torch/aten_names.h"

namespace tessera {

bool IsMatmulOrAttention(absl::string_view op) {
  static const auto* const names = new AtenNames(
      "mm,addmm,_addmm_activation,bmm,baddbmm,addbmm,mv,addmv,dot,_trilinear,"
      "_scaled_mm,_grouped_mm,convolution,convolution_overrideable,"
      "mkldnn_rnn_layer,_cudnn_rnn,"
      "_scaled_dot_product_flash_attention_for_cpu,"
      "_scaled_dot_product_flash_attention,"
      "_scaled_dot_product_efficient_attention,"
      "_scaled_dot_product_cudnn_attention,"
      "_scaled_dot_product_fused_attention_overrideable,"
      "_flash_attention_forward,_efficient_attention_forward");
  return names->Contains(op);
}

}  // namespace tessera
