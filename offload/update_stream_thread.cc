// What the stream's thread does: reads (update_stream_reads.cc), computes,
// writes.
#include <utility>

#include "base/monotonic.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "base/trace/trace.h"
#include "c10/core/GradMode.h"
#include "offload/update_stream_unit.h"

namespace tessera {

void UpdateStream::Run() {
  const c10::AutoGradMode no_grad(false);
  while (true) {
    ReadAhead();
    if (computed_ < pushed_) {
      Buffer& buffer = At(computed_++);
      const std::shared_ptr<Unit> unit = buffer.unit;
      const absl::Status status = Compute(&buffer);
      FailUnit(unit.get(), status);
      if (status.ok()) SetComputed(&buffer);
      if (buffer.slice.end == unit->numel) EndComputed(unit.get());
      if (!status.ok()) EndSlice(&buffer, absl::OkStatus());
      RetireWritten();
      continue;
    }
    for (int64_t i = FirstInMemory(); i < computed_; ++i) AwaitWritten(&At(i));
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
         (reading_ != nullptr && HasRoom());
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
absl::Status UpdateStream::Compute(Buffer* buffer) {
  const absl::Duration begin = MonotonicNow();
  absl::Status read;
  {
    const TraceScope trace(TraceTrack::kHostUpdate, "wait for the disk",
                           buffer->unit->update.unit);
    read = WaitForAll(&buffer->reads);
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
  if (status.ok()) StartWrite(buffer);
  return status;
}

void UpdateStream::StartWrite(Buffer* buffer) {
  const std::vector<StreamedUpdate::State>& states =
      buffer->unit->update.states;
  for (size_t i = 0; i < states.size(); ++i) {
    if (!states[i].written) continue;
    const TieredBuffer& state = *states[i].buffer;
    buffer->writes.push_back(disk_->Write(
        buffer->unit->places[i].to, state.format().BytesOf(buffer->slice.begin),
        buffer->data[i], state.format().BytesOf(buffer->slice.numel()),
        state.what()));
  }
}

// Waits until a buffer is written.
void UpdateStream::AwaitWritten(Buffer* buffer) {
  if (buffer->unit == nullptr) return;
  const absl::Duration begin = MonotonicNow();
  const absl::Status status = WaitForAll(&buffer->writes);
  {
    absl::MutexLock lock(&mutex_);
    stats_.stalled += MonotonicNow() - begin;
  }
  EndSlice(buffer, status);
}

void UpdateStream::RetireWritten() {
  for (int64_t i = FirstInMemory(); i < computed_; ++i) {
    Buffer& buffer = At(i);
    if (buffer.unit != nullptr && AllDone(buffer.writes)) AwaitWritten(&buffer);
  }
}

// Nothing of it is under way.
void UpdateStream::EndSlice(Buffer* buffer, const absl::Status& status) {
  const std::shared_ptr<Unit> unit = std::exchange(buffer->unit, nullptr);
  FailUnit(unit.get(), status);
  unit->numel_written += buffer->slice.numel();
  if (unit->numel_written == unit->numel) EndWritten(unit.get());
}

void UpdateStream::EndComputed(Unit* unit) {
  bool certain;
  {
    absl::MutexLock lock(&mutex_);
    certain = unit->fate == Unit::Fate::kCertain;
  }
  for (const StreamedUpdate::State& state : unit->update.states) {
    if (unit->status.ok() && state.written && certain) {
      state.buffer->SetWritten();
    }
  }
  if (unit->update.end != nullptr) {  // after an error, too: some is on its way
    const absl::Status ended = CatchTorch("update of states on the host", [&] {
      unit->end = unit->update.end();
    });
    FailUnit(unit, ended);
  }
  unit->update = StreamedUpdate();
  EndFetches(unit);
  std::shared_ptr<void> held;
  {
    absl::MutexLock lock(&mutex_);
    unit->stage = Unit::Stage::kComputed;
    held = std::move(unit->held);
  }
  held = nullptr;
  unit->computed.End(unit->status, unit->end);
}

void UpdateStream::EndWritten(Unit* unit) {
  unit->written.End(unit->status, unit->end);
  absl::MutexLock lock(&mutex_);
  Renounce(*unit);
  unit->stage = Unit::Stage::kWritten;
  --CountOf(*unit);
}

}  // namespace tessera
