#include "offload/shard_states.h"

#include <algorithm>
#include <utility>

#include "ATen/ops/where.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "offload/update_stream.h"

namespace tessera {
namespace {

struct About {
  const char* name;
  MemoryKind kind;
};

// By ShardStates::State.
constexpr std::array<About, ShardStates::kMoments> kAbout = {{
    {"masters", MemoryKind::kParameters},
    {"parameters", MemoryKind::kParameters},
    {"gradient", MemoryKind::kGradients},
    {"new values", MemoryKind::kOptimizer},
    {"masters", MemoryKind::kOptimizer},
}};

}  // namespace

absl::Status ShardStates::Add(State state, ElementFormat format,
                              TieredBuffer::Place place) {
  const About& about = kAbout[static_cast<size_t>(state)];
  TESSERA_CHECK(!has(state)) << unit_ << ": " << about.name;
  TESSERA_ASSIGN_OR_RETURN(
      At(state), TieredBuffer::Allocate(
                     numel_, format, device_, about.kind, std::move(place),
                     absl::StrCat(about.name, " of unit ", unit_)));
  return absl::OkStatus();
}

void ShardStates::SetWorking(FlatBuffer part) {
  At(kWorking) = TieredBuffer::Over(std::move(part),
                                    absl::StrCat("parameters of unit ", unit_));
  working_is_part_ = true;
}

absl::Status ShardStates::AddMoments(const std::vector<Moment>& moments,
                                     TieredBuffer::Place place) {
  TESSERA_CHECK(moments_.empty()) << unit_;
  std::vector<TieredBuffer> made;  // all of them, or none
  for (const Moment& moment : moments) {
    TESSERA_ASSIGN_OR_RETURN(
        TieredBuffer buffer,
        TieredBuffer::Allocate(numel_, moment.format, device_,
                               MemoryKind::kOptimizer, place,
                               absl::StrCat(moment.name, " of unit ", unit_)));
    made.push_back(std::move(buffer));
  }
  moments_ = std::move(made);
  return absl::OkStatus();
}

std::vector<TieredBuffer*> ShardStates::Written() {
  std::vector<TieredBuffer*> written;
  for (TieredBuffer& moment : moments_) written.push_back(&moment);
  written.push_back(&value());
  if (separate_working() != nullptr) written.push_back(separate_working());
  return written;
}

absl::StatusOr<Raised> ShardStates::RaiseValue() {
  Order();
  return Raised::Of(&value());
}

absl::Status ShardStates::MakeMasters(at::ScalarType dtype,
                                      TieredBuffer::Place place) {
  TorchScope scope;
  const absl::Status made = [&]() -> absl::Status {
    TESSERA_RETURN_IF_ERROR(Add(kMasters, dtype, std::move(place)));
    TESSERA_ASSIGN_OR_RETURN(Raised masters, Raised::Of(&At(kMasters)));
    TESSERA_ASSIGN_OR_RETURN(const Raised working, Raised::Of(&At(kWorking)));
    Order();
    masters.View().copy_(working.View());
    SetChanged();
    return masters.Commit();
  }();
  if (!made.ok()) Drop(kMasters);
  return made;
}

absl::Status ShardStates::RoundMasters() {
  if (!has(kMasters)) return absl::OkStatus();
  TorchScope scope;
  TESSERA_ASSIGN_OR_RETURN(const Raised masters, Raised::Of(&At(kMasters)));
  TESSERA_ASSIGN_OR_RETURN(Raised working, Raised::Of(&At(kWorking)));
  working.View().copy_(masters.View());
  return working.Commit();
}

absl::Status ShardStates::TakeWorking(const at::Tensor& working) {
  if (stream_ != nullptr) {
    TESSERA_RETURN_IF_ERROR(AwaitAllUpdates());
    stream_->BeforeWrite();
  }
  if (has(kMasters)) TESSERA_RETURN_IF_ERROR(TakeMasters(working));
  TieredBuffer& shard = At(kWorking);
  if (shard.elsewhere()) return shard.CopyFrom({0, numel_}, working);
  if (shard.View().const_data_ptr() != working.const_data_ptr()) {
    shard.View().copy_(working);
  }
  return absl::OkStatus();
}

// Piece by piece where masters lie elsewhere: a write must not need memory for
// all of them.
absl::Status ShardStates::TakeMasters(const at::Tensor& working) {
  constexpr int64_t kChunk = 1 << 20;
  TieredBuffer& masters = At(kMasters);
  const auto item = working.element_size();
  const at::ScalarType bits = item == 2   ? at::kShort
                              : item == 4 ? at::kInt
                                          : at::kLong;
  FlatBuffer raised;
  if (masters.elsewhere()) {
    TESSERA_ASSIGN_OR_RETURN(
        raised,
        FlatBuffer::Allocate(std::min(kChunk, numel_), masters.dtype(), device_,
                             MemoryKind::kWorking, Fill::kNone));
  }
  for (int64_t at = 0; at < numel_; at += kChunk) {
    const Range range = {at, std::min(at + kChunk, numel_)};
    const at::Tensor written = Slice(working, range);
    at::Tensor master;
    if (masters.elsewhere()) {
      master = raised.View({0, range.numel()});
      TESSERA_RETURN_IF_ERROR(masters.CopyTo(range, master));
    } else {
      master = masters.View(range);
    }
    const at::Tensor changed =
        master.to(working.scalar_type()).view(bits).ne(written.view(bits));
    master.copy_(at::where(changed, written.to(masters.dtype()), master));
    if (!masters.elsewhere()) continue;
    TESSERA_RETURN_IF_ERROR(masters.CopyFrom(range, master));
  }
  return absl::OkStatus();
}

absl::Status ShardStates::MakeRoomForNext() {
  for (TieredBuffer* const buffer : Written()) {
    if (!buffer->elsewhere()) continue;
    const absl::Status made = buffer->MakeRoomForNext();
    if (made.ok()) continue;
    DropNext();
    return made;
  }
  return absl::OkStatus();
}

void ShardStates::DropNext() {
  for (TieredBuffer* const buffer : Written()) buffer->DropNext();
}

void ShardStates::SwapNext() {
  for (TieredBuffer* const buffer : Written()) {
    if (buffer->next().defined()) buffer->SwapNext();
  }
}

void ShardStates::Order() const {
  absl::MutexLock lock(&mutex_);
  changed_.Order();
}

void ShardStates::SetChanged() {
  absl::MutexLock lock(&mutex_);
  changed_ = StreamPoint::Now(device_);
}

void ShardStates::SetUpdated(CommFuture updated) {
  absl::MutexLock lock(&mutex_);
  updated_ = std::move(updated);
}

CommFuture ShardStates::updated() const {
  absl::MutexLock lock(&mutex_);
  return updated_;
}

absl::Status ShardStates::AwaitLocked() {
  absl::Status status = updated_.Wait();
  if (stream_ != nullptr) status.Update(stream_->DrainKept());
  changed_.Order();
  if (!updated_.valid()) return status;
  changed_ = StreamPoint::Now(device_);  // another stream may be the next
  if (status.ok()) updated_ = CommFuture();
  return status;
}

absl::Status ShardStates::AwaitUpdate() {
  absl::MutexLock lock(&mutex_);
  return AwaitLocked();
}

absl::Status ShardStates::AwaitAllUpdates() {
  absl::MutexLock lock(&mutex_);
  absl::Status status = AwaitLocked();
  if (stream_ != nullptr) status.Update(stream_->Drain());
  return status;
}

}  // namespace tessera
