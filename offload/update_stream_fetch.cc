// Values that are wanted while they are being changed: a gather of parameters
// that lie on the disk would wait until the update has written them, and read
// them back. They come from the slices instead, as they are computed; those
// that were computed before and have left memory are on the disk by then.
//
// What is in memory is copied by who asks, under the lock: the stream's thread
// may be waiting for the disk.
#include <algorithm>
#include <cstring>
#include <utility>

#include "offload/update_stream_unit.h"

namespace tessera {

absl::Status UpdateStream::Fetch::Wait() const {
  absl::Status status = taken_.future().Wait();
  status.Update(read_.Wait());
  return status;
}

std::shared_ptr<const UpdateStream::Fetch> UpdateStream::StartFetch(
    const TieredBuffer& state, void* to) {
  absl::MutexLock lock(&mutex_);
  const auto changing = changing_.find(&state);
  if (changing == changing_.end()) return nullptr;
  Unit& unit = *changing->second;
  auto fetch = std::make_shared<Fetch>();
  fetch->to_ = static_cast<char*>(to);
  while (unit.changed[fetch->state_] != &state) ++fetch->state_;
  if (!failed_.ok()) {
    fetch->taken_.End(failed_);
    return fetch;
  }
  int64_t in_memory = unit.numel_computed;  // from here on
  for (const Buffer& buffer : buffers_) {
    if (buffer.computed.get() != &unit) continue;
    in_memory = std::min(in_memory, buffer.slice.begin);
    TakeSlice(buffer, fetch.get());
  }
  // Earlier slices have been written, or else failed_ says so.
  const size_t i = fetch->state_;
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

void UpdateStream::Renounce(const Unit& unit) {
  for (const TieredBuffer* const state : unit.changed) {
    const auto changing = changing_.find(state);
    if (changing != changing_.end() && changing->second.get() == &unit) {
      changing_.erase(changing);
    }
  }
}

void UpdateStream::TakeSlice(const Buffer& buffer, Fetch* fetch) {
  const ElementFormat& format =
      buffer.computed->changed[fetch->state_]->format();
  std::memcpy(fetch->to_ + format.BytesOf(buffer.slice.begin),
              buffer.data[fetch->state_],
              static_cast<size_t>(format.BytesOf(buffer.slice.numel())));
}

// The buffer holds new values from here on.
void UpdateStream::SetComputed(Buffer* buffer) {
  absl::MutexLock lock(&mutex_);
  buffer->computed = buffer->unit;
  buffer->unit->numel_computed = buffer->slice.end;
  for (const auto& fetch : buffer->unit->fetches) {
    TakeSlice(*buffer, fetch.get());
  }
}

// All of the unit is computed, or nothing more of it will be.
void UpdateStream::EndFetches(Unit* unit) {
  std::vector<std::shared_ptr<Fetch>> fetches;
  {
    absl::MutexLock lock(&mutex_);
    fetches.swap(unit->fetches);
  }
  for (const auto& fetch : fetches) fetch->taken_.End(unit->status);
}

}  // namespace tessera
