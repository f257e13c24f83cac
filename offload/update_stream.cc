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
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  if (thread_.joinable()) thread_.join();
  Use({});
}

UpdateStream::Pushed UpdateStream::Push(StreamedUpdate update) {
  auto unit = std::make_shared<Unit>();
  unit->numel = update.numel;
  for (const StreamedUpdate::State& each : update.states) {
    const TieredBuffer* const state = each.buffer;
    TESSERA_CHECK(state->disk() == disk_.get() && !state->in_memory() &&
                  state->numel() == unit->numel &&
                  state->item_bytes() <= options_.item_bytes)
        << state->what();
  }
  TESSERA_CHECK(static_cast<int64_t>(update.states.size()) <=
                options_.most_states);
  unit->update = std::move(update);
  const Pushed pushed = {unit->computed.future(), unit->written.future()};
  absl::MutexLock lock(&mutex_);
  ++pushed_;
  written_ = false;
  queue_.push_back(std::move(unit));
  return pushed;
}

absl::Status UpdateStream::Drain() {
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(
      +[](UpdateStream* self) ABSL_NO_THREAD_SAFETY_ANALYSIS {
        return self->ended_ == self->pushed_ && self->written_;
      },
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
      if (!status.ok()) EndSlice(&buffer, status);
      if (buffer.slice.end == unit->numel) EndComputed(unit.get());
      RetireWritten();
      continue;
    }
    for (Buffer& buffer : buffers_) AwaitWritten(&buffer);
    absl::MutexLock lock(&mutex_);
    written_ = queue_.empty();
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
      failed = failed_;
    }
    reading_at_ = 0;
    if (failed.ok() && next->numel > 0) {
      reading_ = std::move(next);
    } else {
      next->status = failed;
      EndComputed(next.get());
      next->written.End(failed, next->end);
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
    const int64_t bytes = slice.numel() * state.item_bytes();
    if (state.zeros()) {
      std::memset(buffer->data[i], 0, static_cast<size_t>(bytes));
      continue;
    }
    buffer->reads.push_back(disk_->Read(state.extent(),
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
        disk_->Write(state.extent(), buffer->slice.begin * state.item_bytes(),
                     buffer->data[i],
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
  if (unit->numel_written == unit->numel) {
    unit->written.End(unit->status, unit->end);
  }
}

void UpdateStream::EndComputed(Unit* unit) {
  for (const StreamedUpdate::State& state : unit->update.states) {
    if (unit->status.ok() && state.written) state.buffer->SetWritten();
  }
  if (unit->update.end != nullptr) {  // after an error, too: some is on its way
    const absl::Status ended = CatchTorch("update of states on the host", [&] {
      unit->end = unit->update.end();
    });
    if (!ended.ok()) Fail(ended);
    unit->status.Update(ended);
  }
  unit->update = StreamedUpdate();
  unit->computed.End(unit->status, unit->end);
  absl::MutexLock lock(&mutex_);
  ++ended_;
}

}  // namespace tessera
