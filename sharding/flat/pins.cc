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

void PinSet::Add(const std::shared_ptr<FlatParameter>& flat) {
  if (std::find(flats_.begin(), flats_.end(), flat) != flats_.end()) return;
  if (!flat->PinIfReady()) ThrowIfError(PinForUse(flat.get()));
  flats_.push_back(flat);
}

void PinSet::Clear() {
  for (auto& flat : flats_) flat->Unpin();
  flats_.clear();
}

}  // namespace tessera
