#include "base/kept_buffers.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace tessera {

std::vector<KeptBuffers::Buffer> KeptBuffers::Keep(Buffer buffer) {
  if (buffer.bytes > max_bytes_ / 4) return {buffer};
  std::vector<Buffer> out;
  absl::MutexLock lock(&mutex_);
  kept_.push_back(buffer);
  bytes_ += buffer.bytes;
  while (bytes_ > max_bytes_) {
    out.push_back(kept_.front());
    bytes_ -= kept_.front().bytes;
    kept_.erase(kept_.begin());
  }
  return out;
}

void* KeptBuffers::Take(int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  const auto found =
      std::find_if(kept_.rbegin(), kept_.rend(),
                   [&](const Buffer& b) { return b.bytes == bytes; });
  if (found == kept_.rend()) return nullptr;
  void* const data = found->data;
  kept_.erase(std::prev(found.base()));
  bytes_ -= bytes;
  return data;
}

std::vector<KeptBuffers::Buffer> KeptBuffers::Drop() {
  absl::MutexLock lock(&mutex_);
  bytes_ = 0;
  return std::exchange(kept_, {});
}

}  // namespace tessera
