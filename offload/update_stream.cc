#include "offload/update_stream.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/monotonic.h"
#include "base/status.h"
#include "base/thread/start_thread.h"
#include "base/torch_guard.h"
#include "c10/core/GradMode.h"
#include "sharding/torch/torch_scope.h"

namespace tessera {
namespace {

constexpr int64_t kNumelUnit = 4096;  // of slices, see UpdateStreamOptions

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

}  // namespace

struct UpdateStream::Unit {
  // Where a state is read and written, from Push on.
  struct Place {
    SwapExtent from, to;
    bool zeros = false;
  };

  StreamedUpdate update;
  std::vector<Place> places;  // by state
  bool pushed_early = false;
  std::vector<TieredBuffer*> flipped;  // if it was, and is kept
  CommPromise computed, written;
  int64_t numel = 0;

  // The thread's own.
  int64_t numel_written = 0;
  StreamPoint end;      // of its update
  absl::Status status;  // the first error

  // By the stream's mutex.
  bool early = false;  // may still be dropped
  bool begun = false, is_computed = false, is_written = false;
  int64_t drains = 0;          // before it was pushed
  std::shared_ptr<void> held;  // until it is computed
};

int64_t StreamBytes(const UpdateStreamOptions& options) {
  if (options.most_states == 0) return 0;
  return options.buffers *
         (options.most_states * options.slice_numel * options.item_bytes +
          kSwapAlignment);
}

absl::StatusOr<std::unique_ptr<UpdateStream>> UpdateStream::Create(
    std::shared_ptr<SwapFile> disk, const UpdateStreamOptions& options) {
  TESSERA_CHECK(options.slice_numel % kNumelUnit == 0 && options.buffers > 0);
  std::unique_ptr<UpdateStream> stream(
      new UpdateStream(std::move(disk), options));
  TESSERA_ASSIGN_OR_RETURN(std::vector<Buffer> buffers,
                           stream->TakeMemory(options.most_states));
  stream->Use(std::move(buffers));
  TESSERA_ASSIGN_OR_RETURN(
      stream->thread_,
      StartThread("tessera-update", [self = stream.get()] { self->Run(); }));
  return stream;
}

absl::StatusOr<std::vector<UpdateStream::Buffer>> UpdateStream::TakeMemory(
    int64_t states) const {
  const int64_t state_bytes = options_.slice_numel * options_.item_bytes;
  const int64_t bytes = states * state_bytes + kSwapAlignment;
  std::vector<Buffer> buffers(static_cast<size_t>(options_.buffers));
  if (states == 0) return buffers;
  for (Buffer& buffer : buffers) {
    TESSERA_ASSIGN_OR_RETURN(buffer.memory,
                             AllocateCounted(bytes, MemoryKind::kOptimizer));
    char* at = buffer.memory.data_as<char>();
    at += (kSwapAlignment - reinterpret_cast<uintptr_t>(at) % kSwapAlignment) %
          kSwapAlignment;
    for (int64_t i = 0; i < states; ++i) {
      buffer.data.push_back(at + i * state_bytes);
    }
  }
  return buffers;
}

void UpdateStream::Use(std::vector<Buffer> buffers) {
  for (const Buffer& buffer : buffers_) {
    if (!buffer.data.empty()) disk_->Unregister(buffer.data[0]);
  }
  buffers_ = std::move(buffers);
  memory_bytes_ = 0;
  for (const Buffer& buffer : buffers_) {
    if (buffer.data.empty()) continue;
    memory_bytes_ += buffer.memory.bytes();
    disk_->Register(buffer.data[0], buffer.memory.bytes() - kSwapAlignment);
  }
}

absl::Status UpdateStream::Reserve(int64_t states) {
  TESSERA_RETURN_IF_ERROR(Drain());
  if (states <= options_.most_states) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(std::vector<Buffer> buffers, TakeMemory(states));
  absl::MutexLock lock(&mutex_);  // the thread waits for what comes next
  Use(std::move(buffers));
  options_.most_states = states;
  return absl::OkStatus();
}

UpdateStream::~UpdateStream() {
  DropQueued();
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  if (thread_.joinable()) thread_.join();
  Use({});
}

std::shared_ptr<UpdateStream::Unit> UpdateStream::UnitOf(StreamedUpdate update,
                                                         bool early) const {
  auto unit = std::make_shared<Unit>();
  unit->numel = update.numel;
  unit->pushed_early = unit->early = early;
  for (const StreamedUpdate::State& each : update.states) {
    const TieredBuffer* const state = each.buffer;
    TESSERA_CHECK(state->disk() == disk_.get() && !state->in_memory() &&
                  state->numel() == unit->numel &&
                  state->item_bytes() <= options_.item_bytes)
        << state->what();
    Unit::Place place = {state->extent(), state->extent(), state->zeros()};
    if (early && each.written) {
      place.to = state->next().value();
      unit->flipped.push_back(each.buffer);
    }
    unit->places.push_back(place);
  }
  TESSERA_CHECK(static_cast<int64_t>(update.states.size()) <=
                options_.most_states);
  unit->update = std::move(update);
  return unit;
}

int64_t& UpdateStream::CountOf(const Unit& unit) {
  return unit.early ? early_ : kept_;
}

// It is not one of the early ones any more: what has begun is awaited as the
// others are, whatever becomes of it.
void UpdateStream::TakeOver(const Early& unit) {
  if (unit->begun && !unit->is_written) {
    --early_;
    ++kept_;
  }
  const auto queued = std::find(queue_.begin(), queue_.end(), unit);
  if (queued != queue_.end()) {
    --early_;
    queue_.erase(queued);
  }
  unit->early = false;
}

void UpdateStream::Queue(std::shared_ptr<Unit> unit) {
  absl::MutexLock lock(&mutex_);
  ++CountOf(*unit);
  unit->drains = drains_;
  queue_.push_back(std::move(unit));
}

UpdateStream::Pushed UpdateStream::Push(StreamedUpdate update) {
  std::shared_ptr<Unit> unit = UnitOf(std::move(update), /*early=*/false);
  const Pushed pushed = {unit->computed.future(), unit->written.future()};
  Queue(std::move(unit));
  return pushed;
}

UpdateStream::Early UpdateStream::PushEarly(StreamedUpdate update) {
  std::shared_ptr<Unit> unit = UnitOf(std::move(update), /*early=*/true);
  Queue(unit);
  return unit;
}

std::optional<UpdateStream::Pushed> UpdateStream::Keep(
    const Early& early, std::shared_ptr<void> held) {
  {
    absl::MutexLock lock(&mutex_);
    TakeOver(early);
    if (!early->begun || early->drains != drains_ || !failed_.ok()) {
      return std::nullopt;
    }
    if (!early->is_computed) early->held = std::move(held);
  }
  for (TieredBuffer* const state : early->flipped) state->Flip();
  return Pushed{early->computed.future(), early->written.future()};
}

void UpdateStream::Drop(const Early& early) {
  absl::MutexLock lock(&mutex_);
  TakeOver(early);
}

// Early ones that have not begun are not counted any more. What is returned is
// destroyed by who calls, without the lock.
UpdateStream::Units UpdateStream::TakeQueuedEarly() {
  Units dropped;
  std::deque<std::shared_ptr<Unit>> rest;
  for (std::shared_ptr<Unit>& unit : queue_) {
    if (unit->early) {
      --early_;
      dropped.push_back(std::move(unit));
    } else {
      rest.push_back(std::move(unit));
    }
  }
  queue_ = std::move(rest);
  return dropped;
}

void UpdateStream::DropQueued() {
  Units dropped;
  absl::MutexLock lock(&mutex_);
  dropped = TakeQueuedEarly();
}

absl::Status UpdateStream::Drain() {
  Units dropped;
  absl::MutexLock lock(&mutex_);
  ++drains_;
  dropped = TakeQueuedEarly();
  mutex_.Await(absl::Condition(
      +[](UpdateStream* self) ABSL_NO_THREAD_SAFETY_ANALYSIS {
        return self->kept_ == 0 && self->early_ == 0;
      },
      this));
  return failed_;
}

absl::Status UpdateStream::DrainKept() {
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(
      +[](UpdateStream* self)
           ABSL_NO_THREAD_SAFETY_ANALYSIS { return self->kept_ == 0; },
      this));
  return failed_;
}

UpdateStreamStats UpdateStream::stats() const {
  absl::MutexLock lock(&mutex_);
  return stats_;
}

void UpdateStream::Run() {
  const c10::AutoGradMode no_grad(false);
  while (true) {
    ReadAhead();
    if (computed_ < read_) {
      Buffer& buffer = At(computed_++);
      const std::shared_ptr<Unit> unit = buffer.unit;
      const absl::Status status = Compute(&buffer);
      if (!status.ok()) Fail(status);
      unit->status.Update(status);
      if (buffer.slice.end == unit->numel) EndComputed(unit.get());
      if (!status.ok()) EndSlice(&buffer, absl::OkStatus());
      RetireWritten();
      continue;
    }
    for (Buffer& buffer : buffers_) AwaitWritten(&buffer);
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(
        +[](UpdateStream* self) ABSL_NO_THREAD_SAFETY_ANALYSIS {
          return self->stopping_ || !self->queue_.empty();
        },
        this));
    if (queue_.empty()) return;
  }
}

void UpdateStream::Fail(const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  failed_.Update(status);
}

// reading_ is a unit of which some elements are not being read yet; false if
// there is none.
bool UpdateStream::Next() {
  while (reading_ == nullptr) {
    std::shared_ptr<Unit> next;
    absl::Status failed;
    {
      absl::MutexLock lock(&mutex_);
      if (queue_.empty()) return false;
      next = std::move(queue_.front());
      queue_.pop_front();
      next->begun = true;
      failed = failed_;
    }
    reading_at_ = 0;
    if (failed.ok() && next->numel > 0) {
      reading_ = std::move(next);
    } else {
      next->status = failed;
      EndComputed(next.get());
      EndWritten(next.get());
    }
  }
  return true;
}

// A buffer that is still being written is waited for only where there is
// nothing else to do.
void UpdateStream::ReadAhead() {
  while (read_ - computed_ < static_cast<int64_t>(buffers_.size()) && Next()) {
    Buffer& buffer = At(read_);
    if (computed_ < read_ && !AllDone(buffer.writes)) return;
    AwaitWritten(&buffer);
    const Range slice = {
        reading_at_,
        std::min(reading_at_ + options_.slice_numel, reading_->numel)};
    StartRead(reading_, slice, &buffer);
    ++read_;
    reading_at_ = slice.end;
    if (reading_at_ == reading_->numel) reading_ = nullptr;
  }
}

void UpdateStream::StartRead(std::shared_ptr<Unit> unit, Range slice,
                             Buffer* buffer) {
  const std::vector<StreamedUpdate::State>& states = unit->update.states;
  for (size_t i = 0; i < states.size(); ++i) {
    if (!states[i].read) continue;
    const TieredBuffer& state = *states[i].buffer;
    const Unit::Place& place = unit->places[i];
    const int64_t bytes = slice.numel() * state.item_bytes();
    if (place.zeros) {
      std::memset(buffer->data[i], 0, static_cast<size_t>(bytes));
      continue;
    }
    buffer->reads.push_back(disk_->Read(place.from,
                                        slice.begin * state.item_bytes(),
                                        buffer->data[i], bytes, state.what()));
  }
  buffer->unit = std::move(unit);
  buffer->slice = slice;
}

// And starts to write it. After an error of a slice before it nothing is
// computed or written.
absl::Status UpdateStream::Compute(Buffer* buffer) {
  const absl::Duration begin = MonotonicNow();
  const absl::Status read = WaitForAll(&buffer->reads);
  const absl::Duration computing = MonotonicNow();
  absl::Status status;
  {
    absl::MutexLock lock(&mutex_);
    stats_.stalled += computing - begin;
    status = failed_;
  }
  status.Update(read);
  if (!status.ok()) return status;
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
    buffer->writes.push_back(
        disk_->Write(buffer->unit->places[i].to,
                     buffer->slice.begin * state.item_bytes(), buffer->data[i],
                     buffer->slice.numel() * state.item_bytes(), state.what()));
  }
}

// Of a buffer that is written, or was.
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
  for (int64_t i =
           std::max<int64_t>(0, read_ - static_cast<int64_t>(buffers_.size()));
       i < computed_; ++i) {
    Buffer& buffer = At(i);
    if (buffer.unit != nullptr && AllDone(buffer.writes)) AwaitWritten(&buffer);
  }
}

// Nothing of it is under way.
void UpdateStream::EndSlice(Buffer* buffer, const absl::Status& status) {
  const std::shared_ptr<Unit> unit = std::exchange(buffer->unit, nullptr);
  if (!status.ok()) Fail(status);
  unit->status.Update(status);
  unit->numel_written += buffer->slice.numel();
  if (unit->numel_written == unit->numel) EndWritten(unit.get());
}

void UpdateStream::EndComputed(Unit* unit) {
  for (const StreamedUpdate::State& state : unit->update.states) {
    if (unit->status.ok() && state.written && !unit->pushed_early) {
      state.buffer->SetWritten();
    }
  }
  if (unit->update.end != nullptr) {  // after an error, too: some is on its way
    const absl::Status ended = CatchTorch("update of states on the host", [&] {
      unit->end = unit->update.end();
    });
    if (!ended.ok()) Fail(ended);
    unit->status.Update(ended);
  }
  unit->update = StreamedUpdate();
  std::shared_ptr<void> held;
  {
    absl::MutexLock lock(&mutex_);
    unit->is_computed = true;
    held = std::move(unit->held);
  }
  held = nullptr;
  unit->computed.End(unit->status, unit->end);
}

void UpdateStream::EndWritten(Unit* unit) {
  unit->written.End(unit->status, unit->end);
  absl::MutexLock lock(&mutex_);
  unit->is_written = true;
  --CountOf(*unit);
}

}  // namespace tessera
