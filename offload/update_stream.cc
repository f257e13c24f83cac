#include "offload/update_stream.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "ATen/Parallel.h"
#include "absl/synchronization/notification.h"
#include "base/check.h"
#include "base/status.h"
#include "base/thread/start_thread.h"
#include "base/trace/trace.h"
#include "offload/begin_queued.h"
#include "offload/update_stream_unit.h"

namespace tessera {
namespace {

constexpr int64_t kNumelUnit = 4096;  // of slices, see UpdateStreamOptions

std::atomic<bool> g_begins_queued{false};  // SetBeginsQueued

}  // namespace

void SetBeginsQueued(bool begins) { g_begins_queued = begins; }

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
  // libtorch gives new threads as many as the last one was set to.
  const int all = at::get_num_threads();
  const int some = std::max(1, static_cast<int>(options.threads * all));
  absl::Notification begun;
  TESSERA_ASSIGN_OR_RETURN(
      stream->thread_, StartThread("tessera-update", [&, self = stream.get()] {
        (void)at::get_num_threads();  // takes the number of all, once
        if (some < all) at::set_num_threads(some);
        begun.Notify();
        self->Run();
      }));
  begun.WaitForNotification();
  if (some < all) at::set_num_threads(all);
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
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&waits_));  // the thread, which uses them
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
  if (early) unit->fate = Unit::Fate::kSpeculative;
  for (const StreamedUpdate::State& each : update.states) {
    const TieredBuffer* const state = each.buffer;
    const int64_t slice_bytes = state->format().BytesOf(options_.slice_numel);
    TESSERA_CHECK(state->disk() == disk_.get() && !state->in_memory() &&
                  state->numel() == unit->numel &&
                  slice_bytes <= options_.slice_numel * options_.item_bytes &&
                  slice_bytes % kSwapAlignment == 0)
        << state->what();
    Unit::Place place = {state->extent(), state->extent(), state->zeros()};
    if (early && each.written) place.to = state->next().value();
    unit->places.push_back(place);
    unit->changed.push_back(each.written ? each.buffer : nullptr);
  }
  TESSERA_CHECK(static_cast<int64_t>(update.states.size()) <=
                options_.most_states);
  if (update.unit.empty() && !update.states.empty()) {
    update.unit = std::string(UnitInText(update.states[0].buffer->what()));
  }
  unit->update = std::move(update);
  return unit;
}

int64_t& UpdateStream::CountOf(const Unit& unit) {
  return unit.fate == Unit::Fate::kSpeculative ? early_ : kept_;
}

// It is not one of the early ones any more: what has begun is awaited as the
// others are, whatever becomes of it.
void UpdateStream::TakeOver(const Early& unit) {
  if (unit->fate != Unit::Fate::kSpeculative) return;
  if (unit->stage != Unit::Stage::kWritten) --early_;
  if (unit->stage == Unit::Stage::kQueued) {
    queue_.erase(std::find(queue_.begin(), queue_.end(), unit));
  } else if (unit->stage != Unit::Stage::kWritten) {
    ++kept_;
  }
  unit->fate = Unit::Fate::kDropped;
}

void UpdateStream::Queue(std::shared_ptr<Unit> unit) {
  absl::MutexLock lock(&mutex_);
  ++CountOf(*unit);
  unit->drains = drains_;
  unit->number = pushes_++;
  if (unit->fate == Unit::Fate::kCertain) Announce(unit);
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
    if (early->fate != Unit::Fate::kSpeculative || early->drains != drains_ ||
        early->failed || !failed_.ok()) {
      TakeOver(early);
      return std::nullopt;
    }
    early->fate = Unit::Fate::kKept;
    if (early->stage != Unit::Stage::kWritten) {
      --early_;
      ++kept_;
      Announce(early);
    }
    if (early->stage < Unit::Stage::kComputed) early->held = std::move(held);
  }
  for (TieredBuffer* const state : early->changed) {
    if (state != nullptr) state->Flip();
  }
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
    if (unit->fate == Unit::Fate::kSpeculative) {
      --early_;
      unit->fate = Unit::Fate::kDropped;
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
  if (g_begins_queued) {
    mutex_.Await(absl::Condition(
        +[](UpdateStream* self)
             ABSL_NO_THREAD_SAFETY_ANALYSIS { return self->queue_.empty(); },
        this));
  }
  dropped = TakeQueuedEarly();
}

// Where they lie is this thread's to ask; whether they are zeros is not, while
// they are being written.
void UpdateStream::Foresee(
    const std::vector<std::vector<TieredBuffer*>>& units) {
  std::deque<std::shared_ptr<Unit>> foreseen;
  for (const std::vector<TieredBuffer*>& states : units) {
    auto unit = std::make_shared<Unit>();
    TESSERA_CHECK(static_cast<int64_t>(states.size()) <= options_.most_states);
    for (TieredBuffer* const state : states) {
      TESSERA_CHECK(state->disk() == disk_.get()) << state->what();
      unit->numel = state->numel();
      unit->update.states.push_back({state, /*read=*/true, /*written=*/false});
      unit->places.push_back({state->extent(), {}, /*zeros=*/false});
    }
    if (unit->numel > 0) foreseen.push_back(std::move(unit));
  }
  absl::MutexLock lock(&mutex_);
  foreseen_.swap(foreseen);
  foreseen_from_ = pushes_;
}

absl::Status UpdateStream::Drain() {
  Units dropped;
  absl::MutexLock lock(&mutex_);
  ++drains_;
  dropped = TakeQueuedEarly();
  foreseen_.clear();
  forget_ = is_ahead_;
  mutex_.Await(absl::Condition(
      +[](UpdateStream* self) ABSL_NO_THREAD_SAFETY_ANALYSIS {
        return self->kept_ == 0 && self->early_ == 0 && !self->is_ahead_;
      },
      this));
  return failed_;
}

absl::Status UpdateStream::DrainKept() {
  absl::MutexLock lock(&mutex_);
  if (kept_ == 0) return failed_;
  const int64_t begin = TraceNow();
  mutex_.Await(absl::Condition(
      +[](UpdateStream* self)
           ABSL_NO_THREAD_SAFETY_ANALYSIS { return self->kept_ == 0; },
      this));
  if (WaitsAreExposed()) {
    NoteExposedWait(WaitReason::kUpdate, "updates behind the step", begin,
                    TraceNow());
  }
  return failed_;
}

UpdateStreamStats UpdateStream::stats() const {
  absl::MutexLock lock(&mutex_);
  return stats_;
}

}  // namespace tessera
