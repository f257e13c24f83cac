// How gradients arrive in the local flat gradient: Add and Fold.
//
// Why an arrival is not simply added to its place: the bits are to be those of
// plain libtorch, which accumulates into .grad in the gradient's own dtype. The
// place may be of another one, in which two roundings would differ. So where a
// parameter may fire more than once in a micro-batch, the gradients are summed
// as partial ones first, and only their sum is rounded to the place's dtype.
//
// Why some are held: what is on its way to the other ranks must not change, and
// nobody waits for a gradient that is not expected, so it may come before or
// after that. All ranks have to launch the same sums, so what is held waits
// until the agreement has told all of them of it.
//
// Why small ones of a device wait for the others, and large ones do not: each
// copy is a launch, which costs more than copying a bias; one for all of a flat
// costs as much as one. To keep large ones would be to hold them twice.
#include <algorithm>
#include <utility>
#include <vector>

#include "ATen/ops/_foreach_copy.h"
#include "base/status.h"
#include "base/stream/stream_uses.h"
#include "sharding/gradient/flat_gradient.h"

namespace tessera {
namespace {

// Up to here a gradient of a device is copied together with others.
constexpr size_t kSmallBytes = 256 << 10;

bool IsSmallOfDevice(const at::Tensor& gradient) {
  return !gradient.is_cpu() && gradient.layout() == at::kStrided &&
         gradient.storage().nbytes() <= kSmallBytes;
}

}  // namespace

absl::Status FlatGradient::Add(int parameter, const at::Tensor& gradient,
                               Arrival how, bool partial) {
  ParameterGradient& p = At(parameter);
  if (p.expected && !p.seen) --num_missing_;
  p.seen = true;
  if (sent_ || !p.expected) {
    AddHeld(&p, gradient, how);
    return absl::OkStatus();
  }
  if (how == Arrival::kZero) return AddZero(parameter, how);
  if (partial || p.partial.defined() ||
      (p.state == State::kAbsent && IsSmallOfDevice(gradient))) {
    AddPartial(&p, gradient, how);
    return absl::OkStatus();
  }
  return AddToPlace(parameter, gradient, how);
}

void FlatGradient::AddHeld(ParameterGradient* p, const at::Tensor& gradient,
                           Arrival how) {
  at::Tensor one = gradient.is_sparse() ? gradient.to_dense() : gradient;
  if (how == Arrival::kAccumulateLocally && !one.is_complex()) {
    one = one.to(DtypeOf(how));
  }
  if (how == Arrival::kZero) one = at::zeros_like(one);
  p->held = p->held.defined() ? p->held + one : one;
}

// kAbsent -> kPartial, kPlaced -> kPlacedAndPartial; more of a partial one.
void FlatGradient::AddPartial(ParameterGradient* p, const at::Tensor& gradient,
                              Arrival how) {
  if (!p->partial.defined()) {
    p->state = p->placed() ? State::kPlacedAndPartial : State::kPartial;
    p->partial = gradient;
    p->partial_how = how;
    return;
  }
  // In the wider dtype.
  if (how == Arrival::kAccumulateLocally) p->partial_how = how;
  // As libtorch: a dense one comes first.
  p->partial = p->partial.is_sparse() && !gradient.is_sparse()
                   ? gradient + p->partial
                   : p->partial + gradient;
}

// kAbsent -> kPlaced, with zeros; what has arrived stays.
absl::Status FlatGradient::AddZero(int parameter, Arrival how) {
  ParameterGradient& p = At(parameter);
  const bool first = p.state == State::kAbsent;
  if (first) p.state = State::kPlaced;
  TESSERA_RETURN_IF_ERROR(EnsureLocal(DtypeOf(how)));
  if (first) PlaceIn(local_, parameter).zero_();
  return absl::OkStatus();
}

// Any state -> kPlaced.
absl::Status FlatGradient::AddToPlace(int parameter, const at::Tensor& gradient,
                                      Arrival how) {
  ParameterGradient& p = At(parameter);
  const bool first = !p.placed();
  p.state = State::kPlaced;
  TESSERA_RETURN_IF_ERROR(EnsureLocal(DtypeOf(how)));
  return WritePlace(parameter, gradient, first);
}

// Whether it lies in memory as the parameter does, which libtorch sees to, and
// has the elements of the local flat gradient.
bool FlatGradient::LiesLikeItsPlace(int parameter,
                                    const at::Tensor& gradient) const {
  const auto& p = flat_->parameters()[Index(parameter)];
  return gradient.is_cpu() && gradient.layout() == at::kStrided &&
         ElementType(gradient.scalar_type()) == local_.dtype() &&
         gradient.is_complex() == p.tensor.is_complex() &&
         gradient.sizes() == p.tensor.sizes() &&
         gradient.strides() == p.tensor.strides() && !gradient.is_conj() &&
         !gradient.is_neg() && !gradient._is_zerotensor();
}

absl::Status FlatGradient::WritePlace(int parameter, const at::Tensor& gradient,
                                      bool first) {
  // Without a walk through the dispatcher.
  if (first && LiesLikeItsPlace(parameter, gradient)) {
    CopyBytes(at::kCPU,
              local_.data(flat_->parameters()[Index(parameter)].range.begin),
              static_cast<const char*>(gradient.const_data_ptr()),
              static_cast<int64_t>(gradient.nbytes()));
    return absl::OkStatus();
  }
  at::Tensor place = PlaceIn(local_, parameter);
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

absl::Status FlatGradient::Fold() {
  TESSERA_RETURN_IF_ERROR(FoldSmall());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    ParameterGradient& p = parameters_[i];
    if (!p.partial.defined()) continue;
    const at::Tensor sum = std::exchange(p.partial, at::Tensor());
    TESSERA_RETURN_IF_ERROR(
        AddToPlace(static_cast<int>(i), sum, p.partial_how));
    KeepForCurrentStream(sum);
  }
  return absl::OkStatus();
}

absl::Status FlatGradient::FoldSmall() {
  std::vector<int> small;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const ParameterGradient& p = parameters_[i];
    if (p.state != State::kPartial || !IsSmallOfDevice(p.partial)) continue;
    small.push_back(static_cast<int>(i));
    // It may move all of it: before the first place is asked for.
    TESSERA_RETURN_IF_ERROR(EnsureLocal(DtypeOf(p.partial_how)));
  }
  if (small.empty()) return absl::OkStatus();
  std::vector<at::Tensor> places, sums;
  for (int i : small) {
    ParameterGradient& p = At(i);
    p.state = State::kPlaced;
    places.push_back(PlaceIn(local_, i));
    sums.push_back(std::exchange(p.partial, at::Tensor()));
  }
  at::_foreach_copy_(places, sums);
  for (const at::Tensor& sum : sums) KeepForCurrentStream(sum);
  return absl::OkStatus();
}

void FlatGradient::UseUp() {
  for (ParameterGradient& p : parameters_) p.used_up = p.expected;
  reduced_.Reset();
  local_.Reset();
}

bool FlatGradient::used_up() const {
  return std::any_of(parameters_.begin(), parameters_.end(),
                     [](const auto& p) { return p.used_up; });
}

std::vector<bool> FlatGradient::left() const {
  std::vector<bool> left;
  for (const ParameterGradient& p : parameters_) {
    left.push_back(p.in_step && !p.used_up);
  }
  return left;
}

void FlatGradient::Begin(bool may_nest) {
  if (may_nest && flat_->used_without_grad()) SetLate();
  for (ParameterGradient& p : parameters_) p.seen = false;
  num_missing_ = num_expected_;
}

}  // namespace tessera
