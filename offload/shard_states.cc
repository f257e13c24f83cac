#include "offload/shard_states.h"

#include <algorithm>
#include <utility>

#include "ATen/ops/empty_like.h"
#include "ATen/ops/where.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "offload/remainders.h"
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

// What is in memory at a time of states that lie elsewhere, in elements.
constexpr int64_t kPiece = 1 << 20;

// Elements of a buffer in memory, for one piece after another: its own, or
// copies of those that lie elsewhere.
class PieceOf {
 public:
  static absl::StatusOr<PieceOf> Make(TieredBuffer* buffer, int64_t numel,
                                      at::Device device) {
    PieceOf piece(buffer);
    if (!buffer->in_memory()) {
      TESSERA_ASSIGN_OR_RETURN(
          piece.copy_,
          FlatBuffer::Allocate(std::min(kPiece, numel), buffer->dtype(), device,
                               MemoryKind::kWorking, Fill::kNone));
    }
    return piece;
  }
  absl::StatusOr<at::Tensor> Read(Range range) const {
    if (!copy_.defined()) return buffer_->View(range);
    const at::Tensor to = copy_.View({0, range.numel()});
    TESSERA_RETURN_IF_ERROR(buffer_->CopyTo(range, to));
    return to;
  }
  absl::Status Write(Range range) const {
    if (!copy_.defined()) return absl::OkStatus();
    return buffer_->CopyFrom(range, copy_.View({0, range.numel()}));
  }

 private:
  explicit PieceOf(TieredBuffer* buffer) : buffer_(buffer) {}
  TieredBuffer* buffer_;
  FlatBuffer copy_;
};

}  // namespace

absl::Status RaisedValue::Commit() {
  return of_ == nullptr ? raised_.Commit()
                        : of_->SplitFrom({0, joined_.numel()}, joined_.View());
}

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

absl::Status ShardStates::Ensure(State state, at::ScalarType dtype,
                                 TieredBuffer::Place place) {
  if (has(state) && At(state).dtype() == dtype) return absl::OkStatus();
  Drop(state);
  return Add(state, dtype, std::move(place));
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

bool ShardStates::splits() const {
  return has(kMasters) && At(kMasters).dtype() == kRemainderDtype;
}

at::ScalarType ShardStates::value_dtype() const {
  return splits() ? at::kFloat : value().dtype();
}

absl::StatusOr<RaisedValue> ShardStates::RaiseValue(bool join) {
  Order();
  const bool joins = join && splits();
  TESSERA_ASSIGN_OR_RETURN(Raised raised,
                           Raised::Of(joins ? nullptr : &value()));
  RaisedValue result(std::move(raised));
  if (!joins) return result;
  result.of_ = this;
  TESSERA_ASSIGN_OR_RETURN(
      result.joined_, FlatBuffer::Allocate(numel_, at::kFloat, device_,
                                           MemoryKind::kWorking, Fill::kNone));
  TESSERA_RETURN_IF_ERROR(JoinTo({0, numel_}, result.joined_.View()));
  return result;
}

template <typename Visit>
absl::Status ShardStates::VisitHalves(Range range, bool writes,
                                      const Visit& visit) {
  TorchScope scope;
  TESSERA_ASSIGN_OR_RETURN(
      const PieceOf working,
      PieceOf::Make(&At(kWorking), range.numel(), device_));
  TESSERA_ASSIGN_OR_RETURN(
      const PieceOf remainders,
      PieceOf::Make(&At(kMasters), range.numel(), device_));
  for (int64_t at = range.begin; at < range.end; at += kPiece) {
    const Range piece = {at, std::min(at + kPiece, range.end)};
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor upper, working.Read(piece));
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor lower, remainders.Read(piece));
    visit(piece, upper, lower);
    if (!writes) continue;
    TESSERA_RETURN_IF_ERROR(working.Write(piece));
    TESSERA_RETURN_IF_ERROR(remainders.Write(piece));
  }
  return absl::OkStatus();
}

absl::Status ShardStates::JoinTo(Range range, const at::Tensor& to) {
  return VisitHalves(
      range, /*writes=*/false,
      [&](Range piece, const at::Tensor& working,
          const at::Tensor& remainders) {
        const at::Tensor part =
            Slice(to, {piece.begin - range.begin, piece.end - range.begin});
        const at::Tensor joined = part.device() == working.device()
                                      ? part
                                      : at::empty_like(part, working.device());
        JoinMasters(working, remainders, joined);
        if (!joined.is_same(part)) part.copy_(joined);
      });
}

// A disk takes writes at some places only.
absl::Status ShardStates::SplitFrom(Range range, const at::Tensor& from) {
  const bool elsewhere = At(kMasters).elsewhere() || At(kWorking).elsewhere();
  if (elsewhere && range.numel() < numel_) {
    TESSERA_ASSIGN_OR_RETURN(RaisedValue value, RaiseValue());
    Slice(value.View(), range).copy_(from);
    return value.Commit();
  }
  return VisitHalves(range, /*writes=*/true,
                     [&](Range piece, const at::Tensor& working,
                         const at::Tensor& remainders) {
                       SplitMasters(Slice(from, {piece.begin - range.begin,
                                                 piece.end - range.begin}),
                                    working, remainders);
                     });
}

absl::Status ShardStates::MakeMasters(at::ScalarType dtype,
                                      TieredBuffer::Place place) {
  TorchScope scope;
  const absl::Status made = [&]() -> absl::Status {
    TESSERA_RETURN_IF_ERROR(Add(kMasters, dtype, std::move(place)));
    if (splits()) return absl::OkStatus();  // nothing remains: zeros
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
  if (!has(kMasters) || splits()) return absl::OkStatus();
  TorchScope scope;
  TESSERA_ASSIGN_OR_RETURN(const Raised masters, Raised::Of(&At(kMasters)));
  TESSERA_ASSIGN_OR_RETURN(Raised working, Raised::Of(&At(kWorking)));
  working.View().copy_(masters.View());
  return working.Commit();
}

absl::Status ShardStates::TakeWorking(const at::Tensor& working,
                                      const at::Tensor& before) {
  if (stream_ != nullptr) {
    TESSERA_RETURN_IF_ERROR(AwaitAllUpdates());
    stream_->BeforeWrite();
  }
  if (splits()) {
    TESSERA_RETURN_IF_ERROR(TakeRemainders(working, before));
  } else if (has(kMasters)) {
    TESSERA_RETURN_IF_ERROR(TakeMasters(working));
  }
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
  TieredBuffer& masters = At(kMasters);
  const auto item = working.element_size();
  const at::ScalarType bits = item == 2   ? at::kShort
                              : item == 4 ? at::kInt
                                          : at::kLong;
  TESSERA_ASSIGN_OR_RETURN(const PieceOf pieces,
                           PieceOf::Make(&masters, numel_, device_));
  for (int64_t at = 0; at < numel_; at += kPiece) {
    const Range range = {at, std::min(at + kPiece, numel_)};
    const at::Tensor written = Slice(working, range);
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor master, pieces.Read(range));
    const at::Tensor changed =
        master.to(working.scalar_type()).view(bits).ne(written.view(bits));
    master.copy_(at::where(changed, written.to(masters.dtype()), master));
    TESSERA_RETURN_IF_ERROR(pieces.Write(range));
  }
  return absl::OkStatus();
}

// A value that is written becomes the master, so nothing remains of that.
absl::Status ShardStates::TakeRemainders(const at::Tensor& working,
                                         const at::Tensor& before) {
  return VisitHalves(
      {0, numel_}, /*writes=*/true,
      [&](Range piece, const at::Tensor& shard, const at::Tensor& remainders) {
        const at::Tensor old = before.defined() ? Slice(before, piece) : shard;
        const at::Tensor written = Slice(working, piece);
        remainders.masked_fill_(
            old.view(at::kShort).ne(written.view(at::kShort)), 0);
      });
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
