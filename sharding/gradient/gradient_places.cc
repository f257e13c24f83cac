// Why a place may be given to a tensor of which nobody knows yet what it will
// be: the forecast may be wrong, but a wrong place costs memory and a copy,
// never a value. Nothing is written to a lent place (LendableFlat moves away
// first), and a gradient counts as lying in its place only if it is where it
// should be and nobody else has its memory. Were one of the two not so, a
// tensor that a user keeps would change under him, or a later write of his
// would change a gradient.
#include "sharding/gradient/gradient_places.h"

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/container/flat_hash_set.h"
#include "base/torch/torch_scope.h"

namespace tessera {
namespace {

absl::flat_hash_set<int64_t> SizesOf(const GradientPlaces::Flats& flats) {
  absl::flat_hash_set<int64_t> sizes;
  for (const auto& flat : flats) {
    for (size_t i = 0; i < flat->num_parameters(); ++i) {
      sizes.insert(flat->LendableBytes(static_cast<int>(i)));
    }
  }
  sizes.erase(0);
  return sizes;
}

}  // namespace

GradientPlaces::GradientPlaces(const Flats& flats, absl::Mutex* mutex,
                               Arrival arrival)
    : mutex_(mutex), arrival_(std::move(arrival)), forecast_(SizesOf(flats)) {
  for (const auto& flat : flats) {
    begins_.push_back(static_cast<int>(parameters_.size()));
    for (size_t i = 0; i < flat->num_parameters(); ++i) {
      parameters_.emplace_back(flat.get(), static_cast<int>(i));
    }
  }
}

GradientPlaces::Backward::Backward(GradientPlaces* places) : places_(places) {
  {
    absl::MutexLock lock(places->mutex_);
    places->forecast_.Begin();
  }
  if (!places->forecast_.empty()) scope_.emplace(places);
}

GradientPlaces::Backward::~Backward() {
  scope_.reset();
  absl::MutexLock lock(places_->mutex_);
  places_->forecast_.End();
}

// What the analysis does not follow is the release by `unlock`.
c10::DataPtr GradientPlaces::Allocate(int64_t bytes, c10::Allocator& base)
    ABSL_NO_THREAD_SAFETY_ANALYSIS {
  const auto size = static_cast<size_t>(bytes);
  // TryLock, since our own work on gradients allocates while it holds the lock:
  // such memory is never a gradient, and waiting would be a deadlock.
  if (!forecast_.Follows(bytes) || !mutex_->TryLock()) {
    return base.allocate(size);
  }
  const auto unlock = absl::MakeCleanup(
      [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { mutex_->Unlock(); });
  const int parameter = forecast_.Next(bytes);
  c10::DataPtr data;
  if (parameter != GradientForecast::kNone) {
    TorchScope scope;  // the user's state is that of an operator
    const auto [flat, i] = parameters_[static_cast<size_t>(parameter)];
    const auto arrival = arrival_(*flat);
    if (arrival.has_value()) data = flat->Lend(i, *arrival);
  }
  if (data.get() == nullptr) data = base.allocate(size);
  forecast_.Lies(bytes, data.get());
  return data;
}

void GradientPlaces::Arrived(int flat, int parameter,
                             const at::Tensor& gradient) {
  const int index = begins_[static_cast<size_t>(flat)] + parameter;
  const int64_t bytes =
      parameters_[static_cast<size_t>(index)].first->LendableBytes(parameter);
  // What others have, too, had better lie elsewhere the next time.
  if (bytes > 0 && gradient.layout() == at::kStrided &&
      static_cast<int64_t>(gradient.storage().nbytes()) == bytes &&
      HasOneOwner(gradient)) {
    forecast_.Became(gradient.const_data_ptr(), bytes, index);
  }
}

}  // namespace tessera
