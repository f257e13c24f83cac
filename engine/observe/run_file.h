// run.json: what a run is, beside its metrics (docs/monitoring.md).
#ifndef ENGINE_OBSERVE_RUN_FILE_H_
#define ENGINE_OBSERVE_RUN_FILE_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/model/sharded_model.h"

namespace tessera {

namespace proto {
class Config;
}
struct PlanReport;  // engine/plan/plan.h

struct RunDescription {
  std::vector<std::string> hosts;  // by rank
  double start_unix_seconds = 0;
  int64_t parameters = 0;  // elements
};

// A JSON object, with a newline behind it. `plan` null: there is none.
std::string RunJson(const ShardedModel& model, const proto::Config& config,
                    const PlanReport* plan, const RunDescription& run);

}  // namespace tessera
#endif  // ENGINE_OBSERVE_RUN_FILE_H_
