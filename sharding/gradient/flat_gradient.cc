#include "sharding/gradient/flat_gradient.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "sharding/flat/sum_over_ranks.h"
#include "sharding/flat/whole_values.h"

namespace tessera {
namespace {

bool Any(const std::vector<bool>& bits) {
  return std::find(bits.begin(), bits.end(), true) != bits.end();
}

}  // namespace

FlatGradient::FlatGradient(std::shared_ptr<FlatParameter> flat,
                           std::vector<bool> expected, int64_t lendable_bytes)
    : flat_(std::move(flat)),
      has_(expected.size(), false),
      local_(*flat_, lendable_bytes) {
  set_expected(std::move(expected));
  DropMicroBatch();
  std::vector<Range> ranges;
  for (const auto& p : flat_->parameters()) ranges.push_back(p.range);
  std::sort(ranges.begin(), ranges.end(),
            [](Range a, Range b) { return a.begin < b.begin; });
  ranges.push_back({flat_->layout().whole_numel(), 0});
  int64_t end = 0;
  for (Range range : ranges) {
    if (end < range.begin) gaps_.push_back({end, range.begin});
    end = range.end;
  }
}

void FlatGradient::set_expected(std::vector<bool> expected) {
  expected_ = std::move(expected);
  num_expected_ =
      static_cast<int>(std::count(expected_.begin(), expected_.end(), true));
}

at::ScalarType FlatGradient::DtypeOf(Arrival how) const {
  return how == Arrival::kAccumulateLocally ? flat_->master_dtype()
                                            : flat_->reduce_dtype();
}

at::Tensor FlatGradient::PlaceIn(const FlatBuffer& buffer,
                                 int parameter) const {
  return tessera::PlaceIn(buffer, *flat_, parameter);
}

// Whether it lies in memory as the parameter does, which libtorch sees to, and
// has the elements of the local flat gradient.
bool FlatGradient::LiesLikeItsPlace(int parameter,
                                    const at::Tensor& gradient) const {
  const auto& p = flat_->parameters()[static_cast<size_t>(parameter)];
  return gradient.is_cpu() && gradient.layout() == at::kStrided &&
         ElementType(gradient.scalar_type()) == local_->dtype() &&
         gradient.is_complex() == p.tensor.is_complex() &&
         gradient.sizes() == p.tensor.sizes() &&
         gradient.strides() == p.tensor.strides() && !gradient.is_conj() &&
         !gradient.is_neg() && !gradient._is_zerotensor();
}

absl::Status FlatGradient::Add(int parameter, const at::Tensor& gradient,
                               Arrival how, bool part) {
  const auto i = static_cast<size_t>(parameter);
  const at::ScalarType dtype = DtypeOf(how);
  if (expected_[i] && !seen_[i]) --num_missing_;
  seen_[i] = true;
  if (sent_ || !expected_[i]) {
    at::Tensor one = gradient.is_sparse() ? gradient.to_dense() : gradient;
    if (how == Arrival::kAccumulateLocally && !one.is_complex())
      one = one.to(dtype);
    if (how == Arrival::kZero) one = at::zeros_like(one);
    held_[i] = held_[i].defined() ? held_[i] + one : one;
    return absl::OkStatus();
  }
  const bool first = !arrived_[i];
  arrived_[i] = true;
  if (how == Arrival::kZero) {
    TESSERA_RETURN_IF_ERROR(EnsureLocal(dtype));
    TESSERA_RETURN_IF_ERROR(local_.Vacate(parameter));
    if (first) PlaceIn(*local_, parameter).zero_();
    return absl::OkStatus();
  }
  Parts& parts = parts_[i];
  if (parts.sum.defined()) {
    if (how == Arrival::kAccumulateLocally)
      parts.how = how;  // in the wider dtype
    // As libtorch: a dense one comes first.
    parts.sum = parts.sum.is_sparse() && !gradient.is_sparse()
                    ? gradient + parts.sum
                    : parts.sum + gradient;
    return absl::OkStatus();
  }
  if (part) {
    parts = {gradient, how, !first};
    return absl::OkStatus();
  }
  return AddToLocal(parameter, gradient, how, first);
}

absl::Status FlatGradient::AddToLocal(int parameter, const at::Tensor& gradient,
                                      Arrival how, bool first) {
  TESSERA_RETURN_IF_ERROR(EnsureLocal(DtypeOf(how)));
  const bool alike = first && LiesLikeItsPlace(parameter, gradient);
  if (alike && local_.LiesInPlace(parameter, gradient)) return absl::OkStatus();
  TESSERA_RETURN_IF_ERROR(local_.Vacate(parameter));
  if (alike) {  // without a walk through the dispatcher
    const auto& p = flat_->parameters()[static_cast<size_t>(parameter)];
    CopyBytes(at::kCPU, local_->data(p.range.begin),
              static_cast<const char*>(gradient.const_data_ptr()),
              static_cast<int64_t>(gradient.nbytes()));
    return absl::OkStatus();
  }
  at::Tensor place = PlaceIn(*local_, parameter);
  if (first && gradient.is_sparse() &&
      gradient.scalar_type() == place.scalar_type()) {
    place.zero_().add_(gradient);  // as to_dense, in place
    return absl::OkStatus();
  }
  const at::Tensor dense =
      gradient.is_sparse() ? gradient.to_dense() : gradient;
  first ? place.copy_(dense) : place.add_(dense);
  return absl::OkStatus();
}

int64_t FlatGradient::LendableBytes(int parameter) const {
  const auto& p = flat_->parameters()[static_cast<size_t>(parameter)];
  const at::ScalarType dtype = ElementType(p.tensor.scalar_type());
  const bool may = dtype == DtypeOf(Arrival::kAdd) ||
                   dtype == DtypeOf(Arrival::kAccumulateLocally);
  return may ? local_.LendableBytes(parameter) : 0;
}

c10::DataPtr FlatGradient::Lend(int parameter, Arrival how) {
  const auto i = static_cast<size_t>(parameter);
  const auto& p = flat_->parameters()[i];
  const at::ScalarType dtype = DtypeOf(how);
  const bool awaited = how != Arrival::kZero && expected_[i] && !seen_[i] &&
                       !arrived_[i] && !sent_ && !late_;
  if (!awaited || ElementType(p.tensor.scalar_type()) != dtype ||
      !EnsureLocal(dtype).ok() || local_->dtype() != dtype) {
    return {};
  }
  return local_.Lend(parameter);
}

absl::Status FlatGradient::Fold() {
  for (size_t i = 0; i < parts_.size(); ++i) {
    if (!parts_[i].sum.defined()) continue;
    const Parts parts = std::exchange(parts_[i], Parts());
    TESSERA_RETURN_IF_ERROR(
        AddToLocal(static_cast<int>(i), parts.sum, parts.how, !parts.add));
  }
  return absl::OkStatus();
}

void FlatGradient::Begin(bool may_nest) {
  if (may_nest && flat_->used_without_grad()) SetLate();
  local_.Begin();
  seen_.assign(expected_.size(), false);
  num_missing_ = num_expected_;
}

bool FlatGradient::accumulating() const { return Any(has_); }

bool FlatGradient::reduces_in_place() const {
  return !flat_->stage().sharded_gradients && local_.defined() &&
         local_->dtype() == flat_->master_dtype() &&
         flat_->reduce_dtype() == flat_->master_dtype();
}

// local_ ready to take this micro-batch's gradients. Where it holds the step's
// gradient so far, that moves out first; where it is of another dtype, what has
// arrived is converted.
absl::Status FlatGradient::EnsureLocal(at::ScalarType dtype) {
  if (in_place_) {
    TESSERA_ASSIGN_OR_RETURN(FlatBuffer moved, AllocateReduced(Fill::kNone));
    moved.View().copy_(local_->View(flat_->owned()));
    reduced_ = std::move(moved);
    in_place_ = false;
  }
  const bool holds = local_.defined() && Any(arrived_);
  if (local_.defined() &&
      (local_->dtype() == dtype ||
       (holds && local_->dtype() == flat_->master_dtype()))) {
    return absl::OkStatus();
  }
  if (!holds) local_.Reset();
  TESSERA_ASSIGN_OR_RETURN(
      FlatBuffer fresh,
      FlatBuffer::Allocate(flat_->layout().whole_numel(), dtype,
                           flat_->device(), MemoryKind::kGradients,
                           Fill::kNone));
  for (Range gap : gaps_) fresh.View(gap).zero_();
  if (holds) fresh.View().copy_(local_->View());
  local_.Hold(std::move(fresh));
  return absl::OkStatus();
}

absl::StatusOr<FlatBuffer> FlatGradient::AllocateReduced(Fill fill) const {
  return FlatBuffer::Allocate(flat_->owned().numel(), flat_->master_dtype(),
                              flat_->device(), MemoryKind::kGradients, fill);
}

absl::Status FlatGradient::EnsureReduced(Fill fill) {
  if (in_place_ || reduced_.defined()) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(reduced_, AllocateReduced(fill));
  return absl::OkStatus();
}

absl::StatusOr<at::Tensor> FlatGradient::Outgoing(double predivide) {
  const at::ScalarType dtype = flat_->reduce_dtype();
  TESSERA_RETURN_IF_ERROR(Fold());
  TESSERA_RETURN_IF_ERROR(EnsureLocal(dtype));
  // What others still have must not change under them from here on.
  TESSERA_RETURN_IF_ERROR(local_.VacateAll());
  // What did not arrive counts as zero here: another rank may have it.
  for (size_t i = 0; i < arrived_.size(); ++i) {
    if (!arrived_[i]) local_->View(flat_->parameters()[i].range).zero_();
  }
  sent_ = true;
  at::Tensor whole = local_->View();
  if (local_->dtype() != dtype) {
    TESSERA_ASSIGN_OR_RETURN(
        outgoing_, FlatBuffer::Allocate(flat_->layout().whole_numel(), dtype,
                                        flat_->device(), MemoryKind::kGradients,
                                        Fill::kNone));
    outgoing_.View().copy_(whole);
    whole = outgoing_.View();
    if (flat_->stage().sharded_gradients) local_.Reset();
  }
  if (predivide != 1) whole.div_(predivide);
  return whole;
}

absl::StatusOr<at::Tensor> FlatGradient::PlaceOfSums(const at::Tensor& whole) {
  const bool to_stay = flat_->stage().sharded_gradients && !accumulating() &&
                       flat_->owned().numel() < whole.numel() &&
                       whole.scalar_type() == flat_->master_dtype();
  if (!to_stay) return Slice(whole, flat_->owned());
  TESSERA_RETURN_IF_ERROR(EnsureReduced(Fill::kNone));
  return reduced_.View();
}

at::Tensor FlatGradient::Mean(const at::Tensor& sums, double divisor) const {
  const at::Tensor wide = sums.to(flat_->master_dtype());
  return divisor == 1 ? wide : wide.div(divisor);
}

absl::Status FlatGradient::TakeSums(const at::Tensor& sums, double divisor) {
  if (accumulating()) {
    divisor_ = divisor;
    sums_ = sums;
    const bool stays = !flat_->stage().sharded_gradients &&
                       sums.data_ptr() == local_->data(flat_->owned().begin);
    if (!stays) {
      TESSERA_ASSIGN_OR_RETURN(
          sums_memory_, FlatBuffer::Allocate(
                            sums.numel(), sums.scalar_type(), flat_->device(),
                            MemoryKind::kGradients, Fill::kNone));
      sums_ = sums_memory_.View().copy_(sums);
    }
  } else {
    at::Tensor to;
    if (reduces_in_place()) {
      to = local_->View(flat_->owned());
    } else if (local_.defined() && sums.numel() == local_->numel() &&
               sums.data_ptr() == local_->data() && local_.has_one_owner() &&
               local_->dtype() == flat_->master_dtype()) {
      reduced_ = local_.Take();  // alone, all of it is ours
      to = reduced_.View();
    } else {
      TESSERA_RETURN_IF_ERROR(EnsureReduced(Fill::kNone));
      to = reduced_.View();
    }
    if (to.data_ptr() != sums.data_ptr()) to.copy_(sums);
    if (divisor != 1) to.div_(divisor);
  }
  DropOutgoing();
  return absl::OkStatus();
}

void FlatGradient::DropOutgoing() {
  outgoing_.Reset();
  if (flat_->stage().sharded_gradients) local_.Reset();
}

void FlatGradient::Accumulate(int parameter, const at::Tensor& mean) {
  const at::Tensor step = owned();
  for (const auto& segment : flat_->segments()) {
    if (segment.parameter != parameter) continue;
    const int64_t begin = segment.range.begin - flat_->owned().begin;
    const at::Tensor to = step.narrow(0, begin, segment.range.numel());
    const at::Tensor from = mean.narrow(0, begin, segment.range.numel());
    if (has_[static_cast<size_t>(parameter)]) {
      to.add_(from);
    } else {
      to.copy_(from);
    }
  }
}

absl::Status FlatGradient::Commit(const std::vector<bool>& arrived) {
  if (!sent_) return absl::OkStatus();
  if (sums_.defined()) {
    TESSERA_RETURN_IF_ERROR(EnsureReduced(Fill::kZero));
    const at::Tensor mean = Mean(sums_, divisor_);
    for (size_t i = 0; i < arrived.size(); ++i) {
      if (arrived[i]) Accumulate(static_cast<int>(i), mean);
    }
  } else if (reduces_in_place()) {
    in_place_ = true;
    reduced_.Reset();
  }
  for (size_t i = 0; i < arrived.size(); ++i) {
    if (arrived[i]) has_[i] = true;
  }
  return absl::OkStatus();
}

absl::Status FlatGradient::ReduceHeld(const std::vector<bool>& held,
                                      double predivide, double divisor) {
  if (!Any(held)) return absl::OkStatus();
  FlatBuffer whole;
  TESSERA_ASSIGN_OR_RETURN(
      whole,
      FlatBuffer::Allocate(flat_->layout().whole_numel(), flat_->reduce_dtype(),
                           flat_->device(), MemoryKind::kGradients));
  for (size_t i = 0; i < held_.size(); ++i) {
    if (held_[i].defined()) {
      PlaceIn(whole, static_cast<int>(i)).copy_(held_[i]);
    }
  }
  const at::Tensor all = whole.View();
  if (predivide != 1) all.div_(predivide);
  const CommTag tag{
      absl::StrCat("reduction of late gradients of unit ", flat_->name())};
  const at::Tensor mine = whole.View(flat_->owned());
  TESSERA_RETURN_IF_ERROR(StartSum(*flat_, all, mine, tag).Wait());
  TESSERA_RETURN_IF_ERROR(EnsureReduced(Fill::kZero));
  const at::Tensor mean = Mean(mine, divisor);
  for (size_t i = 0; i < held.size(); ++i) {
    if (!held[i]) continue;
    Accumulate(static_cast<int>(i), mean);
    has_[i] = true;
  }
  return absl::OkStatus();
}

void FlatGradient::DropMicroBatch() {
  arrived_.assign(expected_.size(), false);
  seen_.assign(expected_.size(), false);
  held_.assign(expected_.size(), at::Tensor());
  parts_.assign(expected_.size(), Parts());
  sent_ = late_ = false;
  sums_.reset();
  sums_memory_.Reset();
  DropOutgoing();
}

void FlatGradient::Zero() {
  DropMicroBatch();
  flat_->ClearUsedWithoutGrad();
  in_place_ = false;
  has_.assign(has_.size(), false);
  reduced_.Reset();
}

at::Tensor FlatGradient::owned() const {
  if (in_place_) return local_->View(flat_->owned());
  return reduced_.defined() ? reduced_.View() : at::Tensor();
}

absl::StatusOr<at::Tensor> FlatGradient::Whole(int parameter) const {
  if (!has_[static_cast<size_t>(parameter)]) return at::Tensor();
  TESSERA_ASSIGN_OR_RETURN(const FlatBuffer whole,
                           GatherWhole(*flat_, owned(), "gradient"));
  return PlaceIn(whole, parameter).clone();
}

int64_t FlatGradient::resident_bytes() const {
  if (!flat_->trainable()) {
    return (local_.defined() ? local_->bytes() : 0) + reduced_.bytes();
  }
  const auto bytes = [](int64_t numel, at::ScalarType dtype) {
    return numel * static_cast<int64_t>(c10::elementSize(dtype));
  };
  const int64_t reduced = bytes(flat_->owned().numel(), flat_->master_dtype());
  if (flat_->stage().sharded_gradients) return reduced;
  const int64_t local =
      bytes(flat_->layout().whole_numel(), flat_->reduce_dtype());
  return flat_->reduce_dtype() == flat_->master_dtype() ? local
                                                        : local + reduced;
}

}  // namespace tessera
