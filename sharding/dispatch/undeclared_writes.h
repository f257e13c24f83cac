// UndeclaredWrites: with sharding.check_writes, finds the operator that writes
// a parameter although its schema says of all that it writes, and not of that
// one. The engine believes the schema: such a write is lost when the unit is
// freed, or faults where ranks share the working copy
// (base/memory/write_faults.h). Compares the bytes of before and after.
#ifndef SHARDING_DISPATCH_UNDECLARED_WRITES_H_
#define SHARDING_DISPATCH_UNDECLARED_WRITES_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "sharding/flat/flat_parameter.h"

namespace tessera {

class UndeclaredWrites {
 public:
  // Before the operator runs. REQUIRES: pinned, until Check. LOCAL, O(P).
  void Watch(const std::shared_ptr<FlatParameter>& flat);
  // After it: throws FailedPrecondition (StatusException) that names the first
  // parameter that was changed, unless an operator within said that it writes
  // the flat. LOCAL; nothing where nothing is watched.
  void Check(const std::string& name) const;

 private:
  struct Watched {
    std::shared_ptr<FlatParameter> flat;
    int64_t writes;                // FlatParameter::writes_prepared
    std::vector<uint64_t> prints;  // by parameter
  };
  std::vector<Watched> watched_;
};

}  // namespace tessera
#endif  // SHARDING_DISPATCH_UNDECLARED_WRITES_H_
