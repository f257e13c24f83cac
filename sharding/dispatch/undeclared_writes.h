// UndeclaredWrites: finds, with sharding.check_writes, operators that write a
// parameter although their schema does not declare that write. The engine
// trusts the schema: such a write is lost when the unit is freed, or faults
// where ranks share the working copy (base/memory/write_faults.h). Bytes before
// and after the operator are compared.
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
  // Notes the bytes of a flat before the operator runs. REQUIRES: the flat is
  // pinned until Check. LOCAL, O(P).
  void Watch(const std::shared_ptr<FlatParameter>& flat);
  // Compares after the operator: throws FailedPrecondition (StatusException)
  // with the first parameter that was changed, unless an operator within
  // declared that it writes the flat. LOCAL; does nothing where nothing is
  // watched.
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
