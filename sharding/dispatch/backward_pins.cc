#include "sharding/dispatch/backward_pins.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "base/torch_guard.h"
#include "sharding/flat/schedule.h"

namespace tessera {
namespace {

struct All {
  absl::Mutex mutex;  // before any one's own
  absl::flat_hash_set<BackwardPins*> pins ABSL_GUARDED_BY(mutex);
  static All& Global() {
    static All* all = new All();
    return *all;
  }
};

}  // namespace

BackwardPins::BackwardPins() {
  absl::MutexLock lock(&All::Global().mutex);
  All::Global().pins.insert(this);
}

BackwardPins::~BackwardPins() {
  {
    absl::MutexLock lock(&All::Global().mutex);
    All::Global().pins.erase(this);
  }
  Release();
}

void BackwardPins::Add(const std::shared_ptr<FlatParameter>& flat) {
  if (!flat->can_be_freed() || flat->schedule() == nullptr) return;
  absl::MutexLock lock(&mutex_);
  const int64_t numel = numel_ + flat->whole_numel();
  const bool held =
      std::find(flats_.begin(), flats_.end(), flat) != flats_.end();
  if (held || numel > flat->schedule()->max_live()) return;
  ThrowIfError(flat->Pin());
  flats_.push_back(flat);
  numel_ = numel;
}

void BackwardPins::Release() {
  std::vector<std::shared_ptr<FlatParameter>> flats;
  {
    absl::MutexLock lock(&mutex_);
    flats.swap(flats_);
    numel_ = 0;
  }
  for (auto& flat : flats) flat->Unpin();
}

void BackwardPins::ReleaseAll() {
  absl::MutexLock lock(&All::Global().mutex);
  for (BackwardPins* pins : All::Global().pins) pins->Release();
}

}  // namespace tessera
