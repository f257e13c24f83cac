// PinnedBuffer: [n] elements in memory of the host that devices copy from and
// to while the host goes on (pinned). Buffers lie in chunks, each one
// allocation of libtorch's, which rounds every allocation up to a power of two
// and would take up to twice what the buffers of a model have. A chunk is as
// large as the buffer that needs it, and at least a quarter of what there is,
// so that few are made; it is given back with its last buffer.
//
// Threads: any.
#ifndef OFFLOAD_PINNED_BUFFER_H_
#define OFFLOAD_PINNED_BUFFER_H_

#include <cstdint>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "base/layout/flat_buffer.h"
#include "base/layout/layout.h"
#include "base/memory/memory.h"
#include "base/stream/stream_point.h"

namespace tessera {

class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  // Allocates zeros. If the memory was freed before, waits for devices that
  // still use it. ResourceExhausted names kind and size. LOCAL.
  static absl::StatusOr<PinnedBuffer> Allocate(int64_t numel,
                                               at::ScalarType dtype,
                                               MemoryKind kind);
  PinnedBuffer(PinnedBuffer&& other) noexcept { *this = std::move(other); }
  PinnedBuffer& operator=(PinnedBuffer&& other) noexcept;
  ~PinnedBuffer() { Reset(); }
  // Frees the buffer, which nobody uses after the points `uses`. ASYNC.
  void Reset(std::vector<StreamPoint> uses = {});

  bool defined() const { return tensor_.defined(); }
  char* data() const { return static_cast<char*>(tensor_.mutable_data_ptr()); }
  const at::Tensor& View() const { return tensor_; }
  at::Tensor View(Range range) const { return Slice(tensor_, range); }

 private:
  MemoryKind kind_ = MemoryKind::kOther;
  at::Tensor tensor_;  // a view of its chunk
};

// Returns the bytes of all chunks.
int64_t PinnedChunkBytes();

}  // namespace tessera
#endif  // OFFLOAD_PINNED_BUFFER_H_
