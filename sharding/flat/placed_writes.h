// PlacedWrites: what operators wrote into the parameters of one flat at places
// that depend on their input: rows that an index names, elements of a mask, a
// part of a parameter. nn::Embedding with max_norm does so in each forward.
// Where ranks have different input, their parameters would diverge, and below
// stage 3 unnoticed. So the bytes of such a parameter before the first of these
// writes are compared with those at the next border (its working copy is given
// up, or a backward ends), and fingerprints of the changes are compared over
// ranks.
//
// This costs two passes over the written parameter, and on a device a wait for
// it. Of other writes it is only known that there were some. They may have
// given a rank the values of the others, by a collective or a copy, so a
// parameter with such writes is not compared.
//
// Threads: outside order (FlatParameter's mutex).
#ifndef SHARDING_FLAT_PLACED_WRITES_H_
#define SHARDING_FLAT_PLACED_WRITES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/layout/flat_buffer.h"
#include "sharding/copy/flat_description.h"

namespace tessera {

class PlacedWrites {
 public:
  // Notes that `op` is about to write the storage in `slot`, whose values are
  // in `whole`; "": a write that is not a placed one. LOCAL.
  void Note(const FlatDescription& flat, const FlatBuffer& whole, int slot,
            absl::string_view op);
  // Compares with `whole`, which has the written values. LOCAL.
  void Close(const FlatDescription& flat, const FlatBuffer& whole);
  // Returns the changes since the last call, as text for ComparePlacedWrites;
  // "" if there are none. REQUIRES: Close.
  std::string Take(const FlatDescription& flat);
  void Clear() { entries_.clear(); }

 private:
  struct Entry {
    int slot = 0;
    std::string op;  // the first
    bool open = false;
    // Fingerprints before and after the writes; an update in between begins
    // anew.
    uint64_t before = 0, after = 0;
    uint64_t changes = 0;  // up to `before`; 0: there are none
    void Fold();
  };
  std::vector<Entry> entries_;
};

// Compares, by rank, what Take returned for all flats in order.
// FailedPrecondition names the first parameter to which ranks have written
// different values, and where that was found.
absl::Status ComparePlacedWrites(absl::Span<const absl::string_view> all,
                                 absl::string_view where);

}  // namespace tessera
#endif  // SHARDING_FLAT_PLACED_WRITES_H_
