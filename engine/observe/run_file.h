// run.json: what a run is, beside its metrics (docs/monitoring.md).
#ifndef ENGINE_OBSERVE_RUN_FILE_H_
#define ENGINE_OBSERVE_RUN_FILE_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/parts/engine_parts.h"

namespace tessera {

struct RunDescription {
  std::vector<std::string> hosts;  // by rank
  double start_unix_seconds = 0;
  int64_t parameters = 0;  // elements
};

// A JSON object, with a newline behind it.
std::string RunJson(const EngineParts& parts, const RunDescription& run);

}  // namespace tessera
#endif  // ENGINE_OBSERVE_RUN_FILE_H_
