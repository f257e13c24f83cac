// Begins uses of flats: the schedule learns of each use first, and may gather
// this flat and others and free others; then the flat is pinned.
#ifndef SHARDING_FLAT_PINS_H_
#define SHARDING_FLAT_PINS_H_

#include <memory>

#include "absl/container/flat_hash_set.h"
#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "sharding/flat/flat_parameter.h"

namespace tessera {

// Pins the flat for a use, until FlatParameter::Unpin. Contract and errors are
// FlatParameter::Pin's.
absl::Status PinForUse(FlatParameter* flat);

// PinSet: the pins of one scope, released at its end.
class PinSet {
 public:
  PinSet() = default;
  PinSet(const PinSet&) = delete;
  PinSet& operator=(const PinSet&) = delete;
  ~PinSet() { Clear(); }
  // Pins once per flat, however often it is added. Throws StatusException.
  void Add(const std::shared_ptr<FlatParameter>& flat);
  void Clear();
  bool empty() const { return flats_.empty(); }

 private:
  bool Holds(const FlatParameter* flat);

  // Up to so many flats, looking at each is fastest, which holds for most
  // operators; not for one that takes a list of all parameters.
  static constexpr size_t kFew = 8;
  absl::InlinedVector<std::shared_ptr<FlatParameter>, 2> flats_;
  absl::flat_hash_set<const FlatParameter*> many_;  // flats_, beyond kFew
};

}  // namespace tessera
#endif  // SHARDING_FLAT_PINS_H_
