#include "sharding/recompute/checkpointed/tensor_copies.h"

#include <memory>
#include <utility>

#include "ATen/ATen.h"
#include "base/bits.h"
#include "base/torch/storage_access.h"
#include "base/torch/torch_scope.h"
#include "torch/csrc/autograd/functions/basic_ops.h"
#include "torch/csrc/autograd/variable.h"

namespace tessera {

namespace autograd = torch::autograd;

at::Tensor SpanOf(const at::Tensor& tensor) {
  int64_t numel = tensor.numel() == 0 ? 0 : 1;
  for (int64_t d = 0; d < tensor.dim() && numel > 0; ++d) {
    numel += (tensor.size(d) - 1) * tensor.stride(d);
  }
  return tensor.as_strided({numel}, {1}, tensor.storage_offset());
}

at::Tensor OverSpan(const at::Tensor& span, at::IntArrayRef sizes,
                    at::IntArrayRef strides) {
  return span.as_strided(sizes, strides, span.storage_offset());
}

at::Tensor InRole(const at::Tensor& tensor, GradRole role) {
  at::Tensor alias = AliasOf(tensor);
  if (!role.requires_grad) return alias;
  if (role.leaf) {
    alias.unsafeGetTensorImpl()->set_autograd_meta(
        std::make_unique<autograd::AutogradMeta>(alias.unsafeGetTensorImpl(),
                                                 /*requires_grad=*/true));
    return alias;
  }
  auto node = std::make_shared<autograd::Error>(
      "a checkpointed region's function called backward() while it was run "
      "again, expected autograd::grad at most");
  node->add_input_metadata(tensor);
  at::Tensor result =
      autograd::make_variable(alias, autograd::Edge(std::move(node), 0));
  autograd::impl::set_version_counter(result,
                                      autograd::impl::version_counter(tensor));
  return result;
}

uint64_t FingerprintOf(const at::Tensor& tensor) {
  if (tensor.has_storage() &&
      IsHidden(tensor.storage().unsafeGetStorageImpl())) {
    return 0;
  }
  TorchScope scope;
  at::Tensor plain = AliasOf(tensor).resolve_conj().resolve_neg();
  if (plain.layout() != at::kStrided) plain = plain.to_dense();
  plain = plain.to(at::kCPU).contiguous();
  return Fingerprint(plain.const_data_ptr(),
                     static_cast<int64_t>(plain.nbytes()));
}

}  // namespace tessera
