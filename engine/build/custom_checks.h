// Checks that a configuration and a program's own optimizer go together.
#ifndef ENGINE_BUILD_CUSTOM_CHECKS_H_
#define ENGINE_BUILD_CUSTOM_CHECKS_H_

#include <optional>

#include "absl/status/status.h"
#include "optim/custom/custom_optimizer.h"

namespace tessera {

namespace proto {
class Config;
}

// Returns InvalidArgument for one without the other, for what
// CheckCustomOptimizer refuses, and for options that the optimizer does not
// read; Unimplemented for a schedule that changes these. REQUIRES: `config` is
// resolved. LOCAL.
absl::Status CheckCustom(const proto::Config& config,
                         const std::optional<CustomOptimizer>& optimizer);

}  // namespace tessera
#endif  // ENGINE_BUILD_CUSTOM_CHECKS_H_
