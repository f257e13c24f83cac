// run.json: describes a run, beside its metrics (docs/monitoring.md).
#ifndef ENGINE_OBSERVE_RUN_FILE_H_
#define ENGINE_OBSERVE_RUN_FILE_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/model/sharded_model.h"
#include "engine/observe/run_starts.h"

namespace tessera {

namespace proto {
class Config;
}
struct PlanReport;  // engine/plan/plan.h

struct RunDescription {
  std::vector<std::string> hosts;  // by rank
  double start_unix_seconds = 0;
  int64_t parameters = 0;  // elements
  std::string command;     // CommandText
  std::string earlier;     // the run.json that was there; "": none
};

// Returns what run.json says of a start of this model.
RunStart StartOf(const ShardedModel& model, double start_unix_seconds);

// Returns a JSON object followed by a newline. `plan` null: there is none.
std::string RunJson(const ShardedModel& model, const proto::Config& config,
                    const PlanReport* plan, const RunDescription& run);

}  // namespace tessera
#endif  // ENGINE_OBSERVE_RUN_FILE_H_
