// StorageGroups: finds the parameters that share a storage. What happens to a
// storage (gathering, freeing) happens to all of them.
#ifndef SHARDING_PARTITION_STORAGE_GROUPS_H_
#define SHARDING_PARTITION_STORAGE_GROUPS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "sharding/partition/named_parameter.h"

namespace tessera {

struct StorageGroup {
  std::vector<int> members;  // parameters, in their order
  int64_t numel = 0;         // their sum; of one that stands in, the whole's
};

struct StorageGroups {
  std::vector<StorageGroup> groups;  // in order of their first members
  std::vector<int> of;               // for each parameter, its group
};

// Groups parameters by storage. REQUIRES: strided tensors. LOCAL.
StorageGroups GroupByStorage(absl::Span<const NamedParameter> parameters);

// Returns InvalidArgument with two parameters of one storage that differ in
// dtype or have elements in common. LOCAL.
absl::Status CheckStorages(const StorageGroups& storages,
                           absl::Span<const NamedParameter> parameters);

}  // namespace tessera
#endif  // SHARDING_PARTITION_STORAGE_GROUPS_H_
