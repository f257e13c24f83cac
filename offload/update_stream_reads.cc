// What the stream's thread reads, and when: what is pushed, or else what is
// predicted.
#include <algorithm>
#include <utility>

#include "offload/update_stream.h"

namespace tessera {

// A buffer that is still being written is waited for only where there is
// nothing else to do. What is ahead may take all room: then what is pushed
// begins with it.
void UpdateStream::ReadAhead() {
  SliceBuffers& slices = *buffers_;
  while ((slices.HasRoom() || !ahead_.empty()) && Next() && slices.HasRoom()) {
    SliceBuffer& buffer = slices.At(slices.read);
    if (slices.computed < slices.read && !buffer.IsWritten()) return;
    EndSlice(&buffer);
    buffer.unit = reading_;
    {
      absl::MutexLock lock(&mutex_);
      buffer.computed = nullptr;
      buffer.slice = {reading_at_, std::min(reading_at_ + options_.slice_numel,
                                            reading_->numel)};
    }
    buffer.StartRead(disk_.get(), /*first_state=*/0);
    ++slices.read;
    if (ahead_.empty()) slices.pushed = slices.read;
    reading_at_ = buffer.slice.end;
    if (reading_at_ == reading_->numel) reading_ = nullptr;
  }
}

// reading_ is a unit of which some elements are not being read yet; false if
// there is none. What is pushed comes before what is predicted.
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
        reading_ = std::move(predicted_.front());
        predicted_.pop_front();
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
  return !predicted_.empty() && kept_ == 0 && failed_.ok() &&
         buffers_->HasRoom();
}

// The next of the queue; what is predicted goes on behind it, or not at all.
std::shared_ptr<StreamUnit> UpdateStream::Pop() {
  std::shared_ptr<Unit> next = std::move(queue_.front());
  queue_.pop_front();
  next->stage = Unit::Stage::kReading;
  if (next->numel == 0 || next->number < predicted_from_) return next;
  if (!ahead_.empty()) {
    if (!next->ReadsFirst(*ahead_.front())) predicted_.clear();
  } else if (!predicted_.empty()) {
    if (next->ReadsFirst(*predicted_.front())) {
      predicted_.pop_front();
    } else {
      predicted_.clear();
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

// It is what was predicted: what has been read of that is its.
void UpdateStream::Adopt(const std::shared_ptr<Unit>& unit) {
  const std::shared_ptr<Unit> predicted = std::move(ahead_.front());
  ahead_.erase(ahead_.begin());
  for (; buffers_->pushed < buffers_->read; ++buffers_->pushed) {
    SliceBuffer& buffer = buffers_->At(buffers_->pushed);
    if (buffer.unit != predicted) break;
    buffer.unit = unit;
    buffer.StartRead(disk_.get(), predicted->places.size());
  }
  if (reading_ == predicted) reading_ = unit;
  absl::MutexLock lock(&mutex_);
  is_ahead_ = !ahead_.empty();
}

// What was predicted did not come. Its errors are nobody's.
void UpdateStream::DropAhead() {
  for (; buffers_->read > buffers_->pushed; --buffers_->read) {
    SliceBuffer& buffer = buffers_->At(buffers_->read - 1);
    (void)buffer.AwaitRead();
    buffer.unit = nullptr;
  }
  if (!ahead_.empty() && reading_ == ahead_.back()) reading_ = nullptr;
  ahead_.clear();
  absl::MutexLock lock(&mutex_);
  is_ahead_ = false;
}

}  // namespace tessera
