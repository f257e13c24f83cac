// FlatBuffer: one counted piece of memory on a device, as a tensor of bytes.
// CPU memory comes from base/memory.h; CUDA memory from libtorch's allocator
// and is entered in the same ledger.
#ifndef SHARDING_FLAT_BUFFER_H_
#define SHARDING_FLAT_BUFFER_H_

#include <cstdint>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "base/memory.h"
#include "sharding/layout.h"

namespace tessera {

class FlatBuffer {
 public:
  FlatBuffer() = default;
  FlatBuffer(FlatBuffer&& other) noexcept;
  FlatBuffer& operator=(FlatBuffer&& other) noexcept;
  ~FlatBuffer();

  // `bytes` zero bytes on `device`. ResourceExhausted names kind and size.
  static absl::StatusOr<FlatBuffer> Allocate(int64_t bytes, at::Device device,
                                             MemoryKind kind);
  void Reset();

  bool defined() const { return tensor_.defined(); }
  int64_t bytes() const { return bytes_; }
  char* data() const { return data_; }
  // The whole buffer, and a range of it, as tensors that do not own memory.
  at::Tensor View(at::ScalarType dtype) const {
    return View(dtype, {0, bytes_});
  }
  at::Tensor View(at::ScalarType dtype, ByteRange range) const;

 private:
  at::Tensor tensor_;  // uint8 [bytes]; does not own CPU memory
  CountedBuffer cpu_;  // CPU memory, else empty
  char* data_ = nullptr;
  int64_t bytes_ = 0;
  MemoryKind kind_ = MemoryKind::kOther;
};

// Copies on the device that both ranges are on.
void CopyBytes(at::Device device, char* to, const char* from, int64_t bytes);

// A tensor over memory that it does not own.
at::Tensor TensorOver(char* data, at::IntArrayRef sizes,
                      at::IntArrayRef strides, at::ScalarType dtype,
                      at::Device device);

}  // namespace tessera
#endif  // SHARDING_FLAT_BUFFER_H_
