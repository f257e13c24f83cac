#include "comm/gloo/piece_buffers.h"

#include <utility>

#include "ATen/ops/from_blob.h"
#include "base/status.h"

namespace tessera {

absl::StatusOr<at::Tensor> PieceBuffers::Take(int64_t bytes,
                                              int64_t piece_bytes) {
  if (state_->piece_bytes < piece_bytes) {
    state_->free.clear();
    state_->piece_bytes = piece_bytes;
  }
  if (state_->free.empty()) {
    TESSERA_ASSIGN_OR_RETURN(
        CountedBuffer made,
        AllocateCounted(state_->piece_bytes, MemoryKind::kCommunication));
    state_->free.push_back(std::move(made));
  }
  auto buffer = std::make_shared<CountedBuffer>(std::move(state_->free.back()));
  state_->free.pop_back();
  void* const data = buffer->data();
  return at::from_blob(
      data, {bytes},
      [buffer, state = state_](void*) {
        if (buffer->bytes() == state->piece_bytes) {
          state->free.push_back(std::move(*buffer));
        }
      },
      at::TensorOptions().dtype(at::kByte));
}

}  // namespace tessera
