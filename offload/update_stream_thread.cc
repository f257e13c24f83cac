// What the stream's thread does: reads (update_stream_reads.cc), computes,
// writes.
#include <utility>

#include "base/monotonic.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "base/trace/trace.h"
#include "c10/core/GradMode.h"
#include "offload/update_stream.h"

namespace tessera {

void UpdateStream::Run() {
  const c10::AutoGradMode no_grad(false);
  while (true) {
    ReadAhead();
    if (buffers_->computed < buffers_->pushed) {
      SliceBuffer& buffer = buffers_->At(buffers_->computed++);
      const std::shared_ptr<Unit> unit = buffer.unit;
      const absl::Status status = Compute(&buffer);
      FailUnit(unit.get(), status);
      if (status.ok()) {
        absl::MutexLock lock(&mutex_);
        buffer.computed = unit;
        unit->numel_computed = buffer.slice.end;
        for (const auto& fetch : unit->fetches) {
          buffer.CopyComputed(fetch->state_, fetch->to_);
        }
      }
      if (buffer.slice.end == unit->numel) EndComputed(unit.get());
      if (!status.ok()) EndSlice(&buffer);
      EndSlices(/*wait=*/false);
      continue;
    }
    EndSlices(/*wait=*/true);
    {
      absl::MutexLock lock(&mutex_);
      waits_ = true;
      mutex_.Await(absl::Condition(this, &UpdateStream::HasWork));
      waits_ = false;
      if (!stopping_ || !queue_.empty()) continue;
    }
    DropAhead();
    return;
  }
}

// Whether there is something to do, or the stream ends.
bool UpdateStream::HasWork() const {
  return stopping_ || forget_ || !queue_.empty() || MayPrefetch() ||
         (reading_ != nullptr && buffers_->HasRoom());
}

void UpdateStream::Fail(const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  failed_.Update(status);
}

// An early one's is nobody else's: it has written where nobody reads. That of
// one that changes nothing on the disk is told to what is pushed behind it.
void UpdateStream::FailUnit(Unit* unit, const absl::Status& status) {
  if (status.ok()) return;
  unit->status.Update(status);
  absl::MutexLock lock(&mutex_);
  unit->failed = true;
  if (unit->fate == Unit::Fate::kCertain ||
      (unit->fate == Unit::Fate::kKept && !unit->changed.empty())) {
    failed_.Update(status);
  }
}

// And starts to write it. After an error of a slice before it nothing is
// computed or written.
absl::Status UpdateStream::Compute(SliceBuffer* buffer) {
  const absl::Duration begin = MonotonicNow();
  absl::Status read;
  {
    const TraceScope trace(TraceTrack::kHostUpdate, "wait for the disk",
                           buffer->unit->update.unit);
    read = buffer->AwaitRead();
  }
  const absl::Duration computing = MonotonicNow();
  absl::Status status;
  {
    absl::MutexLock lock(&mutex_);
    stats_.stalled += computing - begin;
    status = failed_;
  }
  status.Update(buffer->unit->status);
  status.Update(read);
  if (!status.ok()) return status;
  const TraceScope trace(TraceTrack::kHostUpdate, "update",
                         buffer->unit->update.unit);
  status = CatchTorch("update of states on a disk", [&] {
    TorchScope scope;
    return buffer->unit->update.compute(buffer->slice, buffer->data);
  });
  {
    absl::MutexLock lock(&mutex_);
    stats_.computing += MonotonicNow() - computing;
  }
  if (status.ok()) buffer->StartWrite(disk_.get());
  return status;
}

// Ends a slice, when it has been written.
void UpdateStream::EndSlice(SliceBuffer* buffer) {
  if (buffer->unit == nullptr) return;
  const absl::Duration begin = MonotonicNow();
  const absl::Status status = buffer->AwaitWritten();
  {
    absl::MutexLock lock(&mutex_);
    stats_.stalled += MonotonicNow() - begin;
  }
  const std::shared_ptr<Unit> unit = std::exchange(buffer->unit, nullptr);
  FailUnit(unit.get(), status);
  unit->numel_written += buffer->slice.numel();
  if (unit->numel_written == unit->numel) EndWritten(unit.get());
}

// Ends the slices that are written; all of them if it may wait.
void UpdateStream::EndSlices(bool wait) {
  for (int64_t i = buffers_->First(); i < buffers_->computed; ++i) {
    SliceBuffer& buffer = buffers_->At(i);
    if (wait || buffer.IsWritten()) EndSlice(&buffer);
  }
}

void UpdateStream::EndComputed(Unit* unit) {
  bool certain;
  {
    absl::MutexLock lock(&mutex_);
    certain = unit->fate == Unit::Fate::kCertain;
  }
  for (const StreamedUpdate::State& state : unit->update.states) {
    if (unit->status.ok() && state.written && certain) {
      state.buffer->room().SetWritten();
    }
  }
  if (unit->update.end != nullptr) {  // after an error, too: some is on its way
    const absl::Status ended = CatchTorch("update of states on the host", [&] {
      unit->end = unit->update.end();
    });
    FailUnit(unit, ended);
  }
  unit->update = StreamedUpdate();
  // All of it is computed, or nothing more of it will be.
  std::shared_ptr<void> held;
  std::vector<std::shared_ptr<Fetch>> fetches;
  {
    absl::MutexLock lock(&mutex_);
    unit->stage = Unit::Stage::kComputed;
    held = std::move(unit->held);
    fetches.swap(unit->fetches);
  }
  held = nullptr;
  for (const auto& fetch : fetches) fetch->taken_.End(unit->status);
  unit->computed.End(unit->status, unit->end);
}

void UpdateStream::EndWritten(Unit* unit) {
  unit->written.End(unit->status, unit->end);
  absl::MutexLock lock(&mutex_);
  for (const TieredBuffer* const state : unit->changed) {
    const auto changing = changing_.find(state);
    if (changing != changing_.end() && changing->second.get() == unit) {
      changing_.erase(changing);
    }
  }
  unit->stage = Unit::Stage::kWritten;
  --CountOf(*unit);
}

}  // namespace tessera
