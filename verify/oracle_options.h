// A configuration as the oracle's options.
#ifndef VERIFY_ORACLE_OPTIONS_H_
#define VERIFY_ORACLE_OPTIONS_H_

#include "absl/status/statusor.h"
#include "verify/oracle.h"

namespace tessera {

namespace proto {
class Config;
}

// These read a resolved configuration (config/config.h). Seeds and weights are
// the caller's, and a program's groups (verify/engine_groups.h). Unimplemented
// names a key that changes results in a way that the oracle does not know;
// FailedPrecondition without an optimizer.
absl::StatusOr<OracleOptions> OracleOptionsOf(const proto::Config& config,
                                              int world_size, int stage);

}  // namespace tessera
#endif  // VERIFY_ORACLE_OPTIONS_H_
