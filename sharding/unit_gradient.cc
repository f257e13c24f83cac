#include "sharding/unit_gradient.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace tessera {
namespace {

bool Any(const std::vector<bool>& bits) {
  return std::find(bits.begin(), bits.end(), true) != bits.end();
}

}  // namespace

UnitGradient::UnitGradient(std::shared_ptr<Unit> unit,
                           std::vector<bool> expected)
    : unit_(std::move(unit)),
      expected_(std::move(expected)),
      has_(expected_.size(), false) {
  DropMicroBatch();
}

at::Tensor UnitGradient::PlaceIn(const FlatBuffer& flat, int parameter) const {
  const auto& p = unit_->parameters()[parameter];
  return TensorOver(flat.data() + p.flat.begin, p.tensor.sizes(),
                    p.tensor.strides(), unit_->dtype(), unit_->device());
}

absl::Status UnitGradient::Add(int parameter, const at::Tensor& gradient) {
  if (launched_ || !expected_[parameter]) {
    at::Tensor& held = held_[parameter];
    held = held.defined() ? held + gradient : gradient;
    return absl::OkStatus();
  }
  TESSERA_RETURN_IF_ERROR(EnsureLocal());
  at::Tensor place = PlaceIn(local_, parameter);
  if (arrived_[parameter]) {
    place.add_(gradient);
  } else {
    place.copy_(gradient);
  }
  arrived_[parameter] = true;
  return absl::OkStatus();
}

void UnitGradient::Begin() { late_ = late_ || Any(arrived_); }

bool UnitGradient::AnyExpected() const { return Any(expected_); }

bool UnitGradient::accumulating() const { return Any(has_); }

bool UnitGradient::Complete() const {
  if (late_ || unit_->used_without_grad()) return false;
  for (size_t i = 0; i < expected_.size(); ++i) {
    if (expected_[i] && !arrived_[i]) return false;
  }
  return true;
}

// local_ ready to take this micro-batch's gradients. Where it holds the step's
// gradient so far, that moves out first.
absl::Status UnitGradient::EnsureLocal() {
  if (in_place_) {
    FlatBuffer moved;
    const ByteRange owned = unit_->owned();
    TESSERA_ASSIGN_OR_RETURN(
        moved, FlatBuffer::Allocate(owned.bytes(), unit_->device(),
                                    MemoryKind::kGradients));
    CopyBytes(unit_->device(), moved.data(), local_.data() + owned.begin,
              owned.bytes());
    reduced_ = std::move(moved);
    in_place_ = false;
  }
  if (local_.defined()) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(
      local_, FlatBuffer::Allocate(unit_->layout().whole_bytes(),
                                   unit_->device(), MemoryKind::kGradients));
  return absl::OkStatus();
}

absl::Status UnitGradient::EnsureReduced() {
  if (in_place_ || reduced_.defined()) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(
      reduced_, FlatBuffer::Allocate(unit_->owned().bytes(), unit_->device(),
                                     MemoryKind::kGradients));
  return absl::OkStatus();
}

absl::Status UnitGradient::Launch() {
  const Stage stage = unit_->stage();
  TESSERA_RETURN_IF_ERROR(EnsureLocal());
  // What did not arrive counts as zero here: another rank may have it.
  for (size_t i = 0; i < arrived_.size(); ++i) {
    if (arrived_[i]) continue;
    local_.View(at::kByte, unit_->parameters()[i].flat).zero_();
  }
  const CommTag tag{
      absl::StrCat("reduction of the gradients of unit ", unit_->name())};
  Communicator* comm = unit_->communicator();
  const at::Tensor whole = local_.View(unit_->dtype());
  if (!stage.sharded_optimizer) {
    pending_ = comm->AllReduceSum(whole, tag);
  } else if (!stage.sharded_gradients) {
    pending_ = comm->ReduceScatterSum(
        whole, local_.View(unit_->dtype(), unit_->owned()), tag);
  } else if (accumulating()) {
    TESSERA_ASSIGN_OR_RETURN(
        scratch_, FlatBuffer::Allocate(unit_->owned().bytes(), unit_->device(),
                                       MemoryKind::kGradients));
    pending_ =
        comm->ReduceScatterSum(whole, scratch_.View(unit_->dtype()), tag);
  } else {
    TESSERA_RETURN_IF_ERROR(EnsureReduced());
    pending_ =
        comm->ReduceScatterSum(whole, reduced_.View(unit_->dtype()), tag);
  }
  launched_ = true;
  return absl::OkStatus();
}

absl::Status UnitGradient::Finish() {
  TESSERA_RETURN_IF_ERROR(pending_.Wait());
  if (unit_->stage().sharded_gradients) local_.Reset();
  return absl::OkStatus();
}

void UnitGradient::Accumulate(int parameter, const char* owned_from) {
  char* to = owned_data();
  for (const auto& segment : unit_->segments()) {
    if (segment.parameter != parameter) continue;
    const int64_t offset = segment.flat.begin - unit_->owned().begin;
    const int64_t numel = segment.flat.bytes() / unit_->item_bytes();
    auto dst =
        TensorOver(to + offset, {numel}, {1}, unit_->dtype(), unit_->device());
    auto src = TensorOver(const_cast<char*>(owned_from) + offset, {numel}, {1},
                          unit_->dtype(), unit_->device());
    if (has_[parameter]) {
      dst.add_(src);
    } else {
      dst.copy_(src);
    }
  }
}

absl::Status UnitGradient::Commit(const std::vector<bool>& arrived) {
  if (!launched_) return absl::OkStatus();
  const bool sharded = unit_->stage().sharded_gradients;
  const bool adds = accumulating();
  FlatBuffer& sums = !sharded ? local_ : adds ? scratch_ : reduced_;
  const ByteRange range = sharded ? ByteRange{0, sums.bytes()} : unit_->owned();
  const int world_size = unit_->communicator()->world_size();
  if (world_size > 1) sums.View(unit_->dtype(), range).div_(world_size);
  if (adds) {
    TESSERA_RETURN_IF_ERROR(EnsureReduced());
    for (size_t i = 0; i < arrived.size(); ++i) {
      if (arrived[i]) {
        Accumulate(static_cast<int>(i), sums.data() + range.begin);
      }
    }
  } else if (!sharded) {
    in_place_ = true;
    reduced_.Reset();
  }
  for (size_t i = 0; i < arrived.size(); ++i) {
    if (arrived[i]) has_[i] = true;
  }
  return absl::OkStatus();
}

absl::Status UnitGradient::ReduceHeld(const std::vector<bool>& held) {
  if (!Any(held)) return absl::OkStatus();
  FlatBuffer whole;
  TESSERA_ASSIGN_OR_RETURN(
      whole, FlatBuffer::Allocate(unit_->layout().whole_bytes(),
                                  unit_->device(), MemoryKind::kGradients));
  for (size_t i = 0; i < held_.size(); ++i) {
    if (held_[i].defined()) {
      PlaceIn(whole, static_cast<int>(i)).copy_(held_[i]);
    }
  }
  const CommTag tag{
      absl::StrCat("reduction of late gradients of unit ", unit_->name())};
  Communicator* comm = unit_->communicator();
  const at::Tensor all = whole.View(unit_->dtype());
  at::Tensor mine = whole.View(unit_->dtype(), unit_->owned());
  CommFuture done = unit_->stage().sharded_optimizer
                        ? comm->ReduceScatterSum(all, mine, tag)
                        : comm->AllReduceSum(all, tag);
  TESSERA_RETURN_IF_ERROR(done.Wait());
  if (comm->world_size() > 1) mine.div_(comm->world_size());
  TESSERA_RETURN_IF_ERROR(EnsureReduced());
  for (size_t i = 0; i < held.size(); ++i) {
    if (!held[i]) continue;
    Accumulate(static_cast<int>(i), whole.data() + unit_->owned().begin);
    has_[i] = true;
  }
  return absl::OkStatus();
}

void UnitGradient::DropMicroBatch() {
  arrived_.assign(expected_.size(), false);
  held_.assign(expected_.size(), at::Tensor());
  launched_ = late_ = false;
  scratch_.Reset();
  if (unit_->stage().sharded_gradients) local_.Reset();
}

void UnitGradient::Zero() {
  DropMicroBatch();
  unit_->ClearUsedWithoutGrad();
  in_place_ = false;
  has_.assign(has_.size(), false);
  if (!unit_->stage().sharded_gradients) reduced_.Reset();
}

char* UnitGradient::owned_data() const {
  if (in_place_) return local_.data() + unit_->owned().begin;
  return reduced_.defined() ? reduced_.data() : nullptr;
}

absl::StatusOr<at::Tensor> UnitGradient::Whole(int parameter) const {
  if (!has_[parameter]) return at::Tensor();
  FlatBuffer whole;
  TESSERA_ASSIGN_OR_RETURN(
      whole, FlatBuffer::Allocate(unit_->layout().whole_bytes(),
                                  unit_->device(), MemoryKind::kWorking));
  CopyBytes(unit_->device(), whole.data() + unit_->owned().begin, owned_data(),
            unit_->owned().bytes());
  if (unit_->stage().sharded_optimizer) {
    TESSERA_RETURN_IF_ERROR(
        unit_->communicator()
            ->AllGather(
                whole.View(unit_->dtype(), unit_->owned()),
                whole.View(unit_->dtype()),
                CommTag{absl::StrCat("gradient of unit ", unit_->name())})
            .Wait());
  }
  return PlaceIn(whole, parameter).clone();
}

int64_t UnitGradient::resident_bytes() const {
  return unit_->stage().sharded_gradients ? unit_->owned().bytes()
                                          : unit_->layout().whole_bytes();
}

}  // namespace tessera
