#include "sharding/flat/pins.h"

#include <algorithm>

#include "base/torch_guard.h"
#include "sharding/flat/schedule.h"

namespace tessera {

// The schedule comes first: it makes room, and its lock is taken before any
// flat's. A flat that it frees for another use right after is gathered by Pin.
absl::Status PinForUse(FlatParameter* flat) {
  if (flat->PinIfReady()) return absl::OkStatus();
  if (flat->records_uses()) flat->schedule()->Touch(flat);
  return flat->Pin();
}

bool PinSet::Holds(const FlatParameter* flat) {
  if (flats_.size() > kFew) return many_.contains(flat);
  return std::any_of(flats_.begin(), flats_.end(),
                     [&](const auto& held) { return held.get() == flat; });
}

void PinSet::Add(const std::shared_ptr<FlatParameter>& flat) {
  if (Holds(flat.get())) return;
  if (!flat->PinIfReady()) ThrowIfError(PinForUse(flat.get()));
  flats_.push_back(flat);
  if (flats_.size() <= kFew) return;
  if (many_.empty()) {
    for (const auto& held : flats_) many_.insert(held.get());
  }
  many_.insert(flat.get());
}

void PinSet::Clear() {
  for (auto& flat : flats_) flat->Unpin();
  flats_.clear();
  many_.clear();
}

}  // namespace tessera
