// What is sent, summed and kept of a flat parameter's gradient. Its arrival is
// in flat_gradient_arrivals.cc, its way off the device in
// flat_gradient_elsewhere.cc.
//
// Why sums wait for Commit: until the agreement at the end of backward no rank
// knows whether all have succeeded, and a micro-batch that failed anywhere must
// leave the step's gradient as it was, on all ranks. So where the step already
// has a gradient, the sums lie in memory of their own until then. Where it has
// none they are written to where they will stay: nothing can be lost there,
// since what a parameter without `in_step` has there is not read.
#include "sharding/gradient/flat_gradient.h"

#include <algorithm>
#include <utility>

#include "ATen/ops/_foreach_zero.h"
#include "base/check.h"
#include "base/status.h"
#include "base/stream/stream_uses.h"
#include "base/torch/divide.h"
#include "base/torch_guard.h"
#include "sharding/flat/whole_values.h"

namespace tessera {
FlatGradient::FlatGradient(std::shared_ptr<FlatParameter> flat,
                           const std::vector<bool>& expected)
    : flat_(std::move(flat)), parameters_(expected.size()) {
  set_expected(expected);
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

void FlatGradient::set_expected(const std::vector<bool>& expected) {
  num_expected_ = 0;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].expected = expected[i];
    num_expected_ += expected[i] ? 1 : 0;
  }
}

at::ScalarType FlatGradient::DtypeOf(Arrival how) const {
  return how == Arrival::kAccumulateLocally
             ? at::promoteTypes(flat_->gradient_dtype(), flat_->reduce_dtype())
             : flat_->reduce_dtype();
}

at::ScalarType FlatGradient::kept_dtype() const {
  return widened_ ? flat_->gradient_dtype() : flat_->kept_gradient_dtype();
}

at::Tensor FlatGradient::PlaceIn(const FlatBuffer& buffer,
                                 int parameter) const {
  return tessera::PlaceIn(buffer, *flat_, parameter);
}

bool FlatGradient::AnyArrived() const {
  return std::any_of(parameters_.begin(), parameters_.end(),
                     [](const auto& p) { return p.state != State::kAbsent; });
}

bool FlatGradient::accumulating() const {
  return std::any_of(parameters_.begin(), parameters_.end(),
                     [](const auto& p) { return p.in_step; });
}

std::vector<bool> FlatGradient::has_gradient() const {
  std::vector<bool> has;
  for (const ParameterGradient& p : parameters_) has.push_back(p.in_step);
  return has;
}

std::vector<bool> FlatGradient::expected() const {
  std::vector<bool> expected;
  for (const ParameterGradient& p : parameters_) expected.push_back(p.expected);
  return expected;
}

bool FlatGradient::reduces_in_place() const {
  return !flat_->stage().sharded_gradients && local_.defined() &&
         local_.dtype() == kept_dtype() &&
         flat_->reduce_dtype() == kept_dtype();
}

// local_ ready to take this micro-batch's gradients. Where it holds the step's
// gradient so far, that moves out first; where it is of another dtype, what has
// arrived is converted.
absl::Status FlatGradient::EnsureLocal(at::ScalarType dtype) {
  OrderAfterCopy();
  if (in_place_) TESSERA_RETURN_IF_ERROR(MoveOut());
  if (local_.defined() && local_.dtype() == dtype) return absl::OkStatus();
  const bool holds = local_.defined() && AnyArrived();
  if (holds && local_.dtype() == DtypeOf(Arrival::kAccumulateLocally)) {
    return absl::OkStatus();
  }
  if (!holds) local_.Reset();
  TESSERA_ASSIGN_OR_RETURN(
      FlatBuffer fresh,
      FlatBuffer::Allocate(flat_->layout().whole_numel(), dtype,
                           flat_->device(), MemoryKind::kGradients,
                           Fill::kNone));
  if (!gaps_.empty()) {
    std::vector<at::Tensor> gaps;
    for (Range gap : gaps_) gaps.push_back(fresh.View(gap));
    at::_foreach_zero_(gaps);
  }
  if (holds) fresh.View().copy_(local_.View());
  local_ = std::move(fresh);
  return absl::OkStatus();
}

absl::Status FlatGradient::EnsureReduced(at::ScalarType dtype, Fill fill) {
  // What a dropped micro-batch left may be of another dtype.
  const bool fits = !reduced_.defined() || reduced_.dtype() == dtype;
  if (has_step_gradient() && fits) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(
      reduced_,
      FlatBuffer::Allocate(flat_->owned().numel(), dtype, flat_->device(),
                           MemoryKind::kGradients, fill));
  return absl::OkStatus();
}

absl::Status FlatGradient::MoveOut() {
  TESSERA_ASSIGN_OR_RETURN(
      FlatBuffer moved,
      FlatBuffer::Allocate(flat_->owned().numel(), flat_->gradient_dtype(),
                           flat_->device(), MemoryKind::kGradients,
                           Fill::kNone));
  moved.View().copy_(owned());
  reduced_ = std::move(moved);
  in_place_ = false;
  // Room on the host is not exchanged again in each step.
  widened_ |= flat_->updated_on_host();
  return absl::OkStatus();
}

absl::StatusOr<at::Tensor> FlatGradient::Outgoing(double predivide) {
  const at::ScalarType dtype = flat_->reduce_dtype();
  TESSERA_RETURN_IF_ERROR(Fold());
  TESSERA_RETURN_IF_ERROR(EnsureLocal(dtype));
  // What did not arrive counts as zero here: another rank may have it.
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!arrived(i)) local_.View(flat_->parameters()[i].range).zero_();
  }
  sent_ = true;
  at::Tensor whole = local_.View();
  if (local_.dtype() != dtype) {
    TESSERA_ASSIGN_OR_RETURN(
        outgoing_, FlatBuffer::Allocate(flat_->layout().whole_numel(), dtype,
                                        flat_->device(), MemoryKind::kGradients,
                                        Fill::kNone));
    outgoing_.View().copy_(whole);
    whole = outgoing_.View();
    if (flat_->stage().sharded_gradients) local_.Reset();
  }
  DivideBy(whole, predivide);
  return whole;
}

absl::StatusOr<at::Tensor> FlatGradient::OutgoingHeld(double predivide) {
  sent_ = true;
  sums_.reset();
  sums_memory_.Reset();
  TESSERA_ASSIGN_OR_RETURN(
      outgoing_,
      FlatBuffer::Allocate(flat_->layout().whole_numel(), flat_->reduce_dtype(),
                           flat_->device(), MemoryKind::kGradients));
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!held(i)) continue;
    PlaceIn(outgoing_, static_cast<int>(i)).copy_(parameters_[i].held);
  }
  const at::Tensor whole = outgoing_.View();
  DivideBy(whole, predivide);
  return whole;
}

absl::StatusOr<at::Tensor> FlatGradient::PlaceOfSums(const at::Tensor& whole) {
  const bool to_stay = flat_->stage().sharded_gradients && !accumulating() &&
                       flat_->owned().numel() < whole.numel() &&
                       whole.scalar_type() == flat_->gradient_dtype();
  if (!to_stay) return Slice(whole, flat_->owned());
  TESSERA_RETURN_IF_ERROR(AwaitReaders());
  ForgetStored();  // of a micro-batch that was dropped
  TESSERA_RETURN_IF_ERROR(EnsureReduced(flat_->gradient_dtype(), Fill::kNone));
  return reduced_.View();
}

// Rounded once.
void FlatGradient::Divide(const at::Tensor& sums, double divisor,
                          const at::Tensor& mean) const {
  const bool in_place = mean.scalar_type() == sums.scalar_type() ||
                        mean.scalar_type() == flat_->step_dtype();
  if (!in_place) {
    mean.copy_(Mean(sums, divisor));
    return;
  }
  if (mean.data_ptr() != sums.data_ptr()) mean.copy_(sums);
  DivideBy(mean, divisor);
}

at::Tensor FlatGradient::Mean(const at::Tensor& sums, double divisor) const {
  at::Tensor mean = sums.to(flat_->step_dtype());
  DivideBy(mean, divisor);
  return mean;
}

absl::Status FlatGradient::TakeSums(const at::Tensor& sums, double divisor) {
  if (accumulating()) {
    divisor_ = divisor;
    sums_ = sums;
    const bool stays = !flat_->stage().sharded_gradients && local_.defined() &&
                       sums.data_ptr() == local_.data(flat_->owned().begin);
    if (!stays) {
      TESSERA_ASSIGN_OR_RETURN(
          sums_memory_, FlatBuffer::Allocate(
                            sums.numel(), sums.scalar_type(), flat_->device(),
                            MemoryKind::kGradients, Fill::kNone));
      sums_ = sums_memory_.View().copy_(sums);
    }
  } else {
    const bool in_place =
        reduced_.defined() && sums.data_ptr() == reduced_.data();
    if (!in_place) TESSERA_RETURN_IF_ERROR(AwaitReaders());
    ForgetStored();
    at::Tensor to;
    if (reduces_in_place()) {
      to = local_.View(flat_->owned());
    } else if (local_.defined() && sums.numel() == local_.numel() &&
               sums.data_ptr() == local_.data() &&
               local_.dtype() == kept_dtype()) {
      reduced_ = std::move(local_);  // alone, all of it is ours
      to = reduced_.View();
    } else {
      TESSERA_RETURN_IF_ERROR(EnsureReduced(kept_dtype(), Fill::kNone));
      to = reduced_.View();
    }
    Divide(sums, divisor, to);
    TESSERA_RETURN_IF_ERROR(StartStore());
  }
  DropOutgoing();
  return absl::OkStatus();
}

absl::StatusOr<Raised> FlatGradient::Raise() const {
  return Raised::Of(elsewhere());
}

absl::StatusOr<Raised> FlatGradient::RaiseToChange() {
  TESSERA_RETURN_IF_ERROR(AwaitReaders());
  if (elsewhere() != nullptr && stored().dtype() != flat_->gradient_dtype()) {
    {
      TESSERA_ASSIGN_OR_RETURN(const Raised narrow, Raise());
      TESSERA_RETURN_IF_ERROR(MoveOut());
    }
    ForgetStored();
    TESSERA_RETURN_IF_ERROR(StartStore());  // with more room
    TESSERA_RETURN_IF_ERROR(FinishStore());
  }
  ForgetMeasured();
  const at::Tensor now = elsewhere() == nullptr ? owned() : at::Tensor();
  if (now.defined() && now.scalar_type() != flat_->gradient_dtype()) {
    TESSERA_RETURN_IF_ERROR(MoveOut());
  }
  return Raise();
}

void FlatGradient::DropOutgoing() {
  outgoing_.Reset();
  if (flat_->stage().sharded_gradients) local_.Reset();
}

// One walk over what this rank owns, whatever the number of parameters.
void FlatGradient::Accumulate(const std::vector<bool>& had,
                              const at::Tensor& mean) {
  const at::Tensor step = owned();
  for (const auto& segment : flat_->segments()) {
    const int parameter = segment.parameter;
    if (!had[Index(parameter)]) continue;
    const int64_t begin = segment.range.begin - flat_->owned().begin;
    const at::Tensor to = step.narrow(0, begin, segment.range.numel());
    const at::Tensor from = mean.narrow(0, begin, segment.range.numel());
    if (At(parameter).in_step) {
      to.add_(from);
    } else {
      to.copy_(from);
    }
  }
}

absl::Status FlatGradient::Commit(const std::vector<bool>& had) {
  if (!sent_) return absl::OkStatus();
  if (sums_.defined()) {
    TESSERA_RETURN_IF_ERROR(FinishStore());
    TESSERA_ASSIGN_OR_RETURN(Raised raised, RaiseToChange());
    TESSERA_RETURN_IF_ERROR(
        EnsureReduced(flat_->gradient_dtype(), Fill::kZero));
    Accumulate(had, Mean(sums_, divisor_));
    sums_.reset();
    sums_memory_.Reset();
    if (is_stored_ && measure_) measured_ = measure_(*this, owned());
    TESSERA_RETURN_IF_ERROR(raised.StartCommit());
  } else if (reduces_in_place()) {
    in_place_ = true;
    reduced_.Reset();
  }
  for (size_t i = 0; i < had.size(); ++i) parameters_[i].in_step |= had[i];
  return absl::OkStatus();
}

void FlatGradient::DropMicroBatch() {
  for (ParameterGradient& p : parameters_) {
    p.seen = false;
    p.state = State::kAbsent;
    for (at::Tensor* const t : {&p.partial, &p.held}) {
      if (t->defined()) KeepForCurrentStream(*t);
      t->reset();
    }
  }
  sent_ = late_ = false;
  sums_.reset();
  sums_memory_.Reset();
  DropOutgoing();
}

void FlatGradient::Zero() {
  DropMicroBatch();
  // An update on the host reads what is there, which stays.
  if (flat_->updated_on_host()) {
    (void)CatchTorch("gradient", [this] { OrderAfterCopy(); });
  } else {
    (void)AwaitReaders();
  }
  flat_->used_without_grad() = false;
  in_place_ = false;
  for (ParameterGradient& p : parameters_) p.in_step = p.used_up = false;
  reduced_.Reset();
  (void)FinishStore();
  ForgetStored();
}

at::Tensor FlatGradient::owned() const {
  if (in_place_) return local_.View(flat_->owned());
  if (is_stored_) return stored().View();
  return reduced_.defined() ? reduced_.View() : at::Tensor();
}

at::Tensor FlatGradient::coming() const {
  return !accumulating() && reduces_in_place() ? local_.View(flat_->owned())
                                               : owned();
}

FlatBuffer FlatGradient::TakeStepGradient() {
  TESSERA_CHECK(!in_place_) << flat_->name();
  return std::exchange(is_stored_, false) ? FlatBuffer() : std::move(reduced_);
}

absl::StatusOr<at::Tensor> FlatGradient::Whole(int parameter) const {
  if (!has_gradient(Index(parameter))) return at::Tensor();
  TESSERA_ASSIGN_OR_RETURN(const Raised raised, Raise());
  TESSERA_ASSIGN_OR_RETURN(const FlatBuffer whole,
                           GatherWhole(*flat_, owned(), "gradient"));
  const at::Tensor gradient = PlaceIn(whole, parameter);
  return whole.dtype() == flat_->step_dtype()
             ? gradient.clone()
             : gradient.to(flat_->step_dtype());
}

int64_t FlatGradient::resident_bytes() const {
  if (!flat_->trainable()) {
    return (local_.defined() ? local_.bytes() : 0) + reduced_.bytes();
  }
  const auto bytes = [](int64_t numel, at::ScalarType dtype) {
    return numel * static_cast<int64_t>(c10::elementSize(dtype));
  };
  const int64_t reduced = bytes(flat_->owned().numel(), kept_dtype());
  if (flat_->options().gradients_tier != Tier::kMemory) return 0;
  if (flat_->stage().sharded_gradients) return reduced;
  const int64_t local =
      bytes(flat_->layout().whole_numel(), flat_->reduce_dtype());
  return flat_->reduce_dtype() == kept_dtype() ? local : local + reduced;
}

}  // namespace tessera
