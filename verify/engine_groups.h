// Converts a program's groups of parameters to the oracle's.
#ifndef VERIFY_ENGINE_GROUPS_H_
#define VERIFY_ENGINE_GROUPS_H_

#include <vector>

#include "absl/status/status.h"
#include "engine/api/engine_types.h"
#include "verify/oracle.h"

namespace tessera {

// Puts EngineOptions::param_groups before the groups that `oracle` has from the
// configuration. Unimplemented names an option that the oracle does not
// support.
absl::Status AddGroups(const std::vector<ParameterGroup>& program,
                       OracleOptions* oracle);

}  // namespace tessera
#endif  // VERIFY_ENGINE_GROUPS_H_
