#include "base/torch/placed_tensor.h"

#include <utility>

#include "ATen/ops/empty.h"
#include "base/torch/torch_scope.h"
#include "torch/csrc/autograd/variable.h"

namespace tessera {

TensorPlace::TensorPlace(const at::Tensor& tensor)
    : dtype(tensor.dtype()),
      keys(tensor.key_set()),
      sizes(tensor.sizes()),
      strides(tensor.strides()),
      offset(tensor.storage_offset()),
      wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number()) {}

at::Tensor TensorPlace::Over(c10::Storage storage) const {
  auto tensor =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, dtype);
  c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(sizes, strides, offset);
  if (wrapped_number) impl->set_wrapped_number(true);
  return tensor;
}

bool TensorPlace::SameAs(const TensorPlace& other) const {
  return dtype == other.dtype && keys == other.keys && sizes == other.sizes &&
         strides == other.strides && offset == other.offset;
}

bool IsPlain(const at::Tensor& tensor) {
  return tensor.has_storage() && tensor.layout() == at::kStrided &&
         !tensor.is_nested() && !tensor.is_quantized() && !tensor.has_names();
}

at::Tensor AliasOf(const at::Tensor& tensor) {
  return at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(
      tensor.is_inference() ? c10::VariableVersion()
                            : torch::autograd::impl::version_counter(tensor),
      /*allow_tensor_metadata_change=*/true));
}

at::Tensor BytesOf(const c10::Storage& storage) {
  TorchScope scope;
  const auto nbytes = static_cast<int64_t>(storage.nbytes());
  at::Tensor bytes =
      at::empty({0}, at::TensorOptions(at::kByte).device(storage.device()));
  return bytes.set_(storage, 0, {nbytes}, {1});
}

c10::Storage CopyOf(const c10::Storage& storage) {
  TorchScope scope;
  const at::Tensor bytes = BytesOf(storage);
  return bytes.clone().storage();
}

}  // namespace tessera
