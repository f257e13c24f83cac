#include "base/memory/kept_buffers.h"

#include <algorithm>
#include <iterator>

namespace tessera {

std::vector<KeptBuffers::Buffer> KeptBuffers::Keep(Buffer buffer,
                                                   int64_t max_bytes) {
  {
    absl::MutexLock lock(&mutex_);
    kept_.push_back({buffer, period_});
    bytes_ += buffer.bytes;
  }
  return Shrink(max_bytes);
}

void* KeptBuffers::Take(int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  const auto found =
      std::find_if(kept_.rbegin(), kept_.rend(),
                   [&](const Kept& k) { return k.buffer.bytes == bytes; });
  if (found == kept_.rend()) return nullptr;
  void* const data = found->buffer.data;
  kept_.erase(std::prev(found.base()));
  bytes_ -= bytes;
  return data;
}

std::vector<KeptBuffers::Buffer> KeptBuffers::Shrink(int64_t max_bytes) {
  absl::MutexLock lock(&mutex_);
  size_t count = 0;
  for (int64_t left = bytes_; left > max_bytes && count < kept_.size();
       ++count) {
    left -= kept_[count].buffer.bytes;
  }
  return TakeOldest(count);
}

std::vector<KeptBuffers::Buffer> KeptBuffers::EndPeriod() {
  absl::MutexLock lock(&mutex_);
  ++period_;
  size_t count = 0;
  while (count < kept_.size() && kept_[count].period + kPeriods <= period_) {
    ++count;
  }
  return TakeOldest(count);
}

std::vector<KeptBuffers::Buffer> KeptBuffers::TakeOldest(size_t count) {
  std::vector<Buffer> out;
  for (size_t i = 0; i < count; ++i) {
    out.push_back(kept_[i].buffer);
    bytes_ -= kept_[i].buffer.bytes;
  }
  kept_.erase(kept_.begin(), kept_.begin() + static_cast<int64_t>(count));
  return out;
}

int64_t KeptBuffers::bytes() const {
  absl::MutexLock lock(&mutex_);
  return bytes_;
}

}  // namespace tessera
