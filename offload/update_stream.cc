#include "offload/update_stream.h"

#include <algorithm>
#include <string>
#include <utility>

#include "ATen/Parallel.h"
#include "absl/synchronization/notification.h"
#include "base/check.h"
#include "base/status.h"
#include "base/thread/start_thread.h"
#include "base/trace/trace.h"

namespace tessera {
namespace {

constexpr int64_t kNumelUnit = 4096;  // of slices, see UpdateStreamOptions

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
  TESSERA_ASSIGN_OR_RETURN(stream->buffers_,
                           stream->Buffers(options.most_states));
  stream->buffers_->Register();
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

absl::StatusOr<std::unique_ptr<SliceBuffers>> UpdateStream::Buffers(
    int64_t states) const {
  return SliceBuffers::Allocate(disk_.get(), options_.buffers, states,
                                options_.slice_numel * options_.item_bytes);
}

absl::Status UpdateStream::Reserve(int64_t states) {
  TESSERA_RETURN_IF_ERROR(Drain());
  if (states <= options_.most_states) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(auto buffers, Buffers(states));
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&waits_));  // the thread, which uses them
  buffers_ = std::move(buffers);
  buffers_->Register();
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
  const std::vector<StreamedUpdate::State>& states = unit->update.states;
  TESSERA_CHECK(static_cast<int64_t>(states.size()) <= options_.most_states);
  for (const StreamedUpdate::State& each : states) {
    const TieredBuffer& state = *each.buffer;
    const int64_t slice_bytes = state.format().BytesOf(options_.slice_numel);
    TESSERA_CHECK(state.room().disk() == disk_ && !state.in_memory() &&
                  state.numel() == unit->numel &&
                  slice_bytes <= options_.slice_numel * options_.item_bytes &&
                  slice_bytes % kSwapAlignment == 0)
        << state.what();
  }
  absl::MutexLock lock(&mutex_);
  ++CountOf(*unit);
  unit->drains = drains_;
  unit->number = pushes_++;
  if (unit->fate == Unit::Fate::kCertain) Announce(unit);
  queue_.push_back(std::move(unit));
}

UpdateStream::Pushed UpdateStream::Push(StreamedUpdate update) {
  std::shared_ptr<Unit> unit = Unit::Of(std::move(update), /*early=*/false);
  const Pushed pushed = {unit->computed.future(), unit->written.future()};
  Queue(std::move(unit));
  return pushed;
}

UpdateStream::Early UpdateStream::PushEarly(StreamedUpdate update) {
  std::shared_ptr<Unit> unit = Unit::Of(std::move(update), /*early=*/true);
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
    if (state != nullptr) state->SwapNext();
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
  dropped = TakeQueuedEarly();
}

void UpdateStream::Prefetch(
    const std::vector<std::vector<TieredBuffer*>>& units) {
  std::deque<std::shared_ptr<Unit>> predicted;
  for (const std::vector<TieredBuffer*>& states : units) {
    TESSERA_CHECK(static_cast<int64_t>(states.size()) <= options_.most_states);
    for (const TieredBuffer* const state : states) {
      TESSERA_CHECK(state->room().disk() == disk_) << state->what();
    }
    auto unit = Unit::Reading(states);
    if (unit->numel > 0) predicted.push_back(std::move(unit));
  }
  absl::MutexLock lock(&mutex_);
  predicted_.swap(predicted);
  predicted_from_ = pushes_;
}

absl::Status UpdateStream::Drain() {
  Units dropped;
  absl::MutexLock lock(&mutex_);
  ++drains_;
  dropped = TakeQueuedEarly();
  predicted_.clear();
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
