// Values that are wanted while they are being changed: a gather of parameters
// that lie on the disk would wait until the update has written them, and read
// them back. They come from the slices instead, as they are computed; those
// that were computed before and have left memory are on the disk by then.
//
// What is in memory is copied by who asks, under the lock: the stream's thread
// may be waiting for the disk.
#include <algorithm>
#include <utility>

#include "offload/update_stream.h"

namespace tessera {

std::shared_ptr<const UpdateStream::Fetch> UpdateStream::StartFetch(
    const TieredBuffer& state, void* to) {
  absl::MutexLock lock(&mutex_);
  const auto changing = changing_.find(&state);
  if (changing == changing_.end()) return nullptr;
  Unit& unit = *changing->second;
  const auto i = static_cast<size_t>(
      std::find(unit.changed.begin(), unit.changed.end(), &state) -
      unit.changed.begin());
  auto fetch = std::make_shared<Fetch>(i, static_cast<char*>(to));
  if (!failed_.ok()) {
    fetch->taken_.End(failed_);
    return fetch;
  }
  int64_t in_memory = unit.numel_computed;  // from here on
  for (const SliceBuffer& buffer : buffers_->all()) {
    if (buffer.computed.get() != &unit) continue;
    in_memory = std::min(in_memory, buffer.slice.begin);
    buffer.CopyComputed(i, fetch->to_);
  }
  // Earlier slices have been written, or else failed_ says so.
  if (in_memory > 0) {
    fetch->read_ =
        disk_->ReadUrgent(unit.places[i].to, 0, to,
                          state.format().BytesOf(in_memory), state.what());
  }
  if (unit.numel_computed == unit.numel) {
    fetch->taken_.End(absl::OkStatus());
  } else {
    unit.fetches.push_back(fetch);
  }
  return fetch;
}

// It is what its states will hold from here on.
void UpdateStream::Announce(const std::shared_ptr<Unit>& unit) {
  for (const TieredBuffer* const state : unit->changed) {
    if (state != nullptr) changing_[state] = unit;
  }
}

}  // namespace tessera
