// PieceBuffers: memory for what is on its way between ranks.
#ifndef COMM_GLOO_PIECE_BUFFERS_H_
#define COMM_GLOO_PIECE_BUFFERS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "base/memory/memory.h"

namespace tessera {

// Buffers of one size, kept when their tensors are gone. Threads: one.
class PieceBuffers {
 public:
  // `bytes`, at most `piece_bytes`, of any values, as a tensor of bytes that
  // holds its buffer. Buffers grow to the largest piece_bytes that was asked
  // for. ResourceExhausted.
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
