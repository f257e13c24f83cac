// PieceBuffers: memory for pieces that are sent between ranks.
#ifndef COMM_GLOO_PIECE_BUFFERS_H_
#define COMM_GLOO_PIECE_BUFFERS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "base/memory/memory.h"

namespace tessera {

// A pool of buffers of one size, which are reused when their tensors are gone.
// Threads: one.
class PieceBuffers {
 public:
  // Returns `bytes`, at most `piece_bytes`, of uninitialized memory, as a
  // tensor of bytes that owns its buffer. Buffers grow to the largest
  // piece_bytes so far. ResourceExhausted.
  absl::StatusOr<at::Tensor> Take(int64_t bytes, int64_t piece_bytes);

 private:
  struct State {
    int64_t piece_bytes = 0;
    std::vector<CountedBuffer> free;
  };
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace tessera
#endif  // COMM_GLOO_PIECE_BUFFERS_H_
