#include "checkpoint/send_all.h"

#include <algorithm>

#include "ATen/Functions.h"
#include "base/status.h"

namespace tessera {
namespace {

constexpr int64_t kChunkBytes = 8 << 20;

}  // namespace

absl::Status SendAll(
    int64_t bytes, int root, at::Device device, Communicator* comm,
    const std::function<absl::Status(int64_t at, char* to, int64_t n)>& read,
    const std::function<absl::Status(int64_t at, absl::string_view)>& write) {
  absl::Status mine;
  at::Tensor chunk = at::empty({std::min(bytes, kChunkBytes)}, at::kByte);
  for (int64_t at = 0; at < bytes; at += kChunkBytes) {
    const int64_t n = std::min(bytes - at, kChunkBytes);
    const at::Tensor part = chunk.slice(0, 0, n);
    char* const data = static_cast<char*>(part.mutable_data_ptr());
    if (comm->rank() == root && mine.ok()) mine = read(at, data, n);
    const at::Tensor sent = part.to(device);
    TESSERA_RETURN_IF_ERROR(
        comm->Broadcast(sent, root, {"part of a checkpoint"}).Wait());
    if (comm->rank() == root || !mine.ok()) continue;
    if (sent.device() != part.device()) part.copy_(sent);
    mine = write(at, {data, static_cast<size_t>(n)});
  }
  return mine;
}

}  // namespace tessera
