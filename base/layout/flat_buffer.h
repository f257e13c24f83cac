// FlatBuffer: one counted piece of memory on a device, as a one-dimensional
// tensor. CPU memory comes from base/memory/memory.h; a device's from
// libtorch's allocator, and is entered in the ledger of that device.
#ifndef BASE_LAYOUT_FLAT_BUFFER_H_
#define BASE_LAYOUT_FLAT_BUFFER_H_

#include <cstdint>
#include <optional>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "base/layout/layout.h"
#include "base/memory/memory.h"
#include "base/torch/tensor_over.h"  // for who works in a buffer

namespace tessera {

// What a new buffer holds: zeros, or whatever the memory held (for one that is
// written whole at once; saves a pass over it).
enum class Fill { kZero, kNone };

// A range of a one-dimensional contiguous tensor: narrow(), without a walk
// through the dispatcher. What is written to one is a new version of both.
at::Tensor Slice(const at::Tensor& flat, Range range);

class FlatBuffer {
 public:
  FlatBuffer() = default;
  FlatBuffer(FlatBuffer&& other) noexcept;
  FlatBuffer& operator=(FlatBuffer&& other) noexcept;
  ~FlatBuffer();

  // ResourceExhausted names kind and size, and what limits if the ledger does.
  static absl::StatusOr<FlatBuffer> Allocate(int64_t numel,
                                             at::ScalarType dtype,
                                             at::Device device, MemoryKind kind,
                                             Fill fill = Fill::kZero);
  // CPU memory of others, which outlives it. `counted`: as what the ledger
  // counts it, if it does. ResourceExhausted.
  static absl::StatusOr<FlatBuffer> Over(char* data, int64_t numel,
                                         at::ScalarType dtype,
                                         std::optional<MemoryKind> counted);
  // A range of it, as a buffer that does not own the memory. REQUIRES: this
  // buffer outlives it.
  FlatBuffer Part(Range range) const;
  void Reset();

  bool defined() const { return tensor_.defined(); }
  int64_t numel() const { return tensor_.defined() ? tensor_.numel() : 0; }
  int64_t bytes() const { return numel() * item_bytes_; }
  at::ScalarType dtype() const { return tensor_.scalar_type(); }
  // Where element `begin` lies.
  char* data(int64_t begin = 0) const { return data_ + begin * item_bytes_; }
  // The whole buffer, and a range of it, as tensors that do not own memory.
  const at::Tensor& View() const { return tensor_; }
  at::Tensor View(Range range) const { return Slice(tensor_, range); }
  // The same memory, read as bytes.
  at::Tensor Bytes() const { return Bytes({0, numel()}); }
  at::Tensor Bytes(Range range) const;

 private:
  absl::Status Enter(MemoryLedger* ledger, int64_t bytes);

  at::Tensor tensor_;               // [numel]; does not own CPU memory
  CountedBuffer cpu_;               // CPU memory of its own, else empty
  MemoryLedger* ledger_ = nullptr;  // where it is entered by hand, if it is
  int64_t entered_bytes_ = 0;
  char* data_ = nullptr;
  int64_t item_bytes_ = 1;
  MemoryKind kind_ = MemoryKind::kOther;
};

// Copies on the device that both ranges are on.
void CopyBytes(at::Device device, char* to, const char* from, int64_t bytes);

// The dtype of the elements that a tensor's numbers count as in a flat buffer:
// that of a complex number's real and imaginary part, otherwise its own. And
// how many elements one number is.
inline at::ScalarType ElementType(at::ScalarType dtype) {
  return c10::toRealValueType(dtype);
}
inline int64_t ElementsPerNumber(at::ScalarType dtype) {
  return c10::isComplexType(dtype) ? 2 : 1;
}

}  // namespace tessera
#endif  // BASE_LAYOUT_FLAT_BUFFER_H_
