#include "base/torch/tensor_over.h"

#include "ATen/ops/from_blob.h"

namespace tessera {

at::Tensor TensorOver(char* data, at::IntArrayRef sizes,
                      at::IntArrayRef strides, at::ScalarType dtype,
                      at::Device device) {
  return at::from_blob(
      data, sizes, strides, /*storage_offset=*/0, [](void*) {},
      at::TensorOptions(dtype).device(device), device);
}

at::Tensor ElementsOver(const at::Tensor& t, int64_t begin, int64_t numel) {
  char* data = static_cast<char*>(t.mutable_data_ptr());
  return at::from_blob(data + begin * t.element_size(), {numel},
                       at::TensorOptions().dtype(t.dtype()).device(t.device()));
}

at::Tensor BytesOver(void* data, int64_t bytes) {
  return at::from_blob(data, {bytes}, at::TensorOptions().dtype(at::kByte));
}

}  // namespace tessera
