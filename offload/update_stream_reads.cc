// What the stream's thread reads, and when: what is pushed, or else what is
// foreseen.
#include <algorithm>
#include <cstring>
#include <utility>

#include "offload/update_stream_unit.h"

namespace tessera {

absl::Status WaitForAll(std::vector<SwapFuture>* futures) {
  absl::Status status;
  for (const SwapFuture& future : *futures) status.Update(future.Wait());
  futures->clear();
  return status;
}

bool AllDone(const std::vector<SwapFuture>& futures) {
  return std::all_of(futures.begin(), futures.end(),
                     [](const SwapFuture& future) { return future.Done(); });
}

// A buffer that is still being written is waited for only where there is
// nothing else to do. What is ahead may take all room: then what is pushed
// begins with it.
void UpdateStream::ReadAhead() {
  while ((HasRoom() || !ahead_.empty()) && Next() && HasRoom()) {
    Buffer& buffer = At(read_);
    if (computed_ < read_ && !AllDone(buffer.writes)) return;
    AwaitWritten(&buffer);
    buffer.unit = reading_;
    {
      absl::MutexLock lock(&mutex_);
      buffer.computed = nullptr;
      buffer.slice = {reading_at_, std::min(reading_at_ + options_.slice_numel,
                                            reading_->numel)};
    }
    StartRead(*reading_, /*first_state=*/0, &buffer);
    ++read_;
    if (ahead_.empty()) pushed_ = read_;
    reading_at_ = buffer.slice.end;
    if (reading_at_ == reading_->numel) reading_ = nullptr;
  }
}

// reading_ is a unit of which some elements are not being read yet; false if
// there is none. What is pushed comes before what is foreseen.
bool UpdateStream::Next() {
  while (reading_ == nullptr || !ahead_.empty()) {
    std::shared_ptr<Unit> next;
    absl::Status failed;
    bool forget;
    {
      absl::MutexLock lock(&mutex_);
      forget = std::exchange(forget_, false);
      failed = failed_;
      if (!forget && !queue_.empty()) {
        next = Pop();
      } else if (!forget && reading_ == nullptr && MayPrefetch()) {
        reading_ = std::move(foreseen_.front());
        foreseen_.pop_front();
        is_ahead_ = true;
        ahead_.push_back(reading_);
        reading_at_ = 0;
        return true;
      }
    }
    if (next != nullptr) {
      Begin(std::move(next), failed);
    } else if (forget) {
      DropAhead();
    } else {
      return reading_ != nullptr;
    }
  }
  return true;
}

// What is not early may be what writes there. An early one writes elsewhere.
bool UpdateStream::MayPrefetch() const {
  return !foreseen_.empty() && kept_ == 0 && failed_.ok() && HasRoom();
}

// The next of the queue; what is foreseen goes on behind it, or not at all.
std::shared_ptr<UpdateStream::Unit> UpdateStream::Pop() {
  std::shared_ptr<Unit> next = std::move(queue_.front());
  queue_.pop_front();
  next->stage = Unit::Stage::kReading;
  if (next->numel == 0 || next->number < foreseen_from_) return next;
  if (!ahead_.empty()) {
    if (!next->ReadsFirst(*ahead_.front())) foreseen_.clear();
  } else if (!foreseen_.empty()) {
    if (next->ReadsFirst(*foreseen_.front())) {
      foreseen_.pop_front();
    } else {
      foreseen_.clear();
    }
  }
  return next;
}

void UpdateStream::Begin(std::shared_ptr<Unit> unit,
                         const absl::Status& failed) {
  if (!failed.ok() || unit->numel == 0) {
    unit->status = failed;
    EndComputed(unit.get());
    EndWritten(unit.get());
  } else if (!ahead_.empty() && unit->ReadsFirst(*ahead_.front())) {
    Adopt(unit);
  } else {
    DropAhead();
    reading_ = std::move(unit);
    reading_at_ = 0;
  }
}

// It is what was foreseen: what has been read of that is its.
void UpdateStream::Adopt(const std::shared_ptr<Unit>& unit) {
  const std::shared_ptr<Unit> foreseen = std::move(ahead_.front());
  ahead_.erase(ahead_.begin());
  for (; pushed_ < read_ && At(pushed_).unit == foreseen; ++pushed_) {
    At(pushed_).unit = unit;
    StartRead(*unit, foreseen->places.size(), &At(pushed_));
  }
  if (reading_ == foreseen) reading_ = unit;
  if (ahead_.empty()) EndAhead();
}

// What was foreseen did not come. Its errors are nobody's.
void UpdateStream::DropAhead() {
  for (; read_ > pushed_; --read_) {
    Buffer& buffer = At(read_ - 1);
    (void)WaitForAll(&buffer.reads);
    buffer.unit = nullptr;
  }
  if (!ahead_.empty() && reading_ == ahead_.back()) reading_ = nullptr;
  ahead_.clear();
  EndAhead();
}

void UpdateStream::EndAhead() {
  absl::MutexLock lock(&mutex_);
  is_ahead_ = false;
}

// Starts to read the buffer's slice, states from `first_state` on.
void UpdateStream::StartRead(const Unit& unit, size_t first_state,
                             Buffer* buffer) {
  const std::vector<StreamedUpdate::State>& states = unit.update.states;
  for (size_t i = first_state; i < states.size(); ++i) {
    if (!states[i].read) continue;
    const TieredBuffer& state = *states[i].buffer;
    const Unit::Place& place = unit.places[i];
    const int64_t bytes = state.format().BytesOf(buffer->slice.numel());
    if (place.zeros) {
      std::memset(buffer->data[i], 0, static_cast<size_t>(bytes));
      continue;
    }
    buffer->reads.push_back(
        disk_->Read(place.from, state.format().BytesOf(buffer->slice.begin),
                    buffer->data[i], bytes, state.what()));
  }
}

bool UpdateStream::Unit::ReadsFirst(const Unit& foreseen) const {
  if (numel != foreseen.numel || places.size() < foreseen.places.size()) {
    return false;
  }
  for (size_t i = 0; i < foreseen.places.size(); ++i) {
    if (update.states[i].buffer != foreseen.update.states[i].buffer ||
        !update.states[i].read || places[i].zeros ||
        places[i].from.begin != foreseen.places[i].from.begin) {
      return false;
    }
  }
  return true;
}

}  // namespace tessera
