// PlacedWrites: what operators wrote into the parameters of one flat at places
// that depend on their input: rows that an index names, elements of a mask, a
// part of a parameter. nn::Embedding with max_norm does so in each forward.
// With other input on each rank the ranks' parameters are no longer the same,
// and below stage 3 nothing would say so. So the bytes of such a parameter
// before the first of these writes are compared with those at the next border
// (its working copy is given up, or a backward ends); fingerprints of what has
// changed are compared over ranks.
//
// Costs two passes over the written parameter, and on a device a wait for it.
// Of other writes it is only known that there were some: a rank that has made
// any may have what the others have, by a collective or a copy, so that nothing
// is said of such a parameter.
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
  // `op` is about to write the storage in `slot`, of which `whole` has the
  // values; "": something does so at no places of its own. LOCAL.
  void Note(const FlatDescription& flat, const FlatBuffer& whole, int slot,
            absl::string_view op);
  // `whole` has what was written. LOCAL.
  void Close(const FlatDescription& flat, const FlatBuffer& whole);
  // What has changed since the last call, as text for ComparePlacedWrites; ""
  // if nothing has. REQUIRES: Close.
  std::string Take(const FlatDescription& flat);
  void Clear() { entries_.clear(); }

 private:
  struct Entry {
    int slot = 0;
    std::string op;  // the first
    bool open = false;
    // What the writes made of what; an update in between begins anew.
    uint64_t before = 0, after = 0;
    uint64_t changes = 0;  // up to `before`; 0: there are none
    void Fold();
  };
  std::vector<Entry> entries_;
};

// By rank, what Take gave of all flats in order. FailedPrecondition names the
// first parameter of which ranks have written different values, and where that
// was found.
absl::Status ComparePlacedWrites(absl::Span<const absl::string_view> all,
                                 absl::string_view where);

}  // namespace tessera
#endif  // SHARDING_FLAT_PLACED_WRITES_H_
