// FlatBuffer is one counted piece of memory on a device, seen as a
// one-dimensional tensor. CPU memory comes from base/memory/memory.h; a
// device's comes from libtorch's allocator and is counted by that device's
// ledger.
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

// Says what a new buffer holds: zeros, or whatever the memory held. kNone saves
// a pass over a buffer that is written whole at once.
enum class Fill { kZero, kNone };

// Returns a range of a one-dimensional contiguous tensor, as narrow() does but
// without the dispatcher. The two share a version counter.
at::Tensor Slice(const at::Tensor& flat, Range range);

class FlatBuffer {
 public:
  FlatBuffer() = default;
  FlatBuffer(FlatBuffer&& other) noexcept;
  FlatBuffer& operator=(FlatBuffer&& other) noexcept;
  ~FlatBuffer();

  // Returns ResourceExhausted with the kind, the size and, if the ledger
  // refuses, the limit.
  static absl::StatusOr<FlatBuffer> Allocate(int64_t numel,
                                             at::ScalarType dtype,
                                             at::Device device, MemoryKind kind,
                                             Fill fill = Fill::kZero);
  // Wraps CPU memory of others, which outlives the buffer. `counted` is the
  // kind that the ledger counts it as; nullopt: it is not counted. Returns
  // ResourceExhausted.
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
  // Returns the address of element `begin`.
  char* data(int64_t begin = 0) const { return data_ + begin * item_bytes_; }
  // Return the whole buffer, or a range of it, as tensors that do not own the
  // memory.
  const at::Tensor& View() const { return tensor_; }
  at::Tensor View(Range range) const { return Slice(tensor_, range); }
  // Return the buffer's bytes as a tensor over the same memory.
  at::Tensor Bytes() const { return Bytes({0, numel()}); }
  at::Tensor Bytes(Range range) const;

 private:
  absl::Status Enter(MemoryLedger* ledger, int64_t bytes);

  at::Tensor tensor_;  // [numel]; does not own CPU memory
  CountedBuffer cpu_;  // CPU memory of its own, else empty
  MemoryLedger* ledger_ =
      nullptr;  // where entered_bytes_ are counted; null if nowhere
  int64_t entered_bytes_ = 0;
  char* data_ = nullptr;
  int64_t item_bytes_ = 1;
  MemoryKind kind_ = MemoryKind::kOther;
};

// Copies within the device that holds both ranges.
void CopyBytes(at::Device device, char* to, const char* from, int64_t bytes);

// ElementType is the dtype of a flat buffer's elements for tensors of `dtype`:
// complex numbers count as real and imaginary parts. ElementsPerNumber says how
// many elements one number takes.
inline at::ScalarType ElementType(at::ScalarType dtype) {
  return c10::toRealValueType(dtype);
}
inline int64_t ElementsPerNumber(at::ScalarType dtype) {
  return c10::isComplexType(dtype) ? 2 : 1;
}

}  // namespace tessera
#endif  // BASE_LAYOUT_FLAT_BUFFER_H_
