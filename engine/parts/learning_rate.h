// The learning rate of an engine: by its schedule, the program, or what a
// metric says. As Engine's calls of these names.
#ifndef ENGINE_PARTS_LEARNING_RATE_H_
#define ENGINE_PARTS_LEARNING_RATE_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "engine/parts/engine_parts.h"
#include "optim/algorithms/optimizer_options.h"

namespace tessera {

// What the optimizer step after `steps_done` uses, of each group of parameters.
// REQUIRES: an optimizer. LOCAL.
std::vector<OptimizerOptions> ScheduledOptions(const EngineParts& parts,
                                               int64_t steps_done);

// Whether that is where an option comes from: "beta1", "momentum". LOCAL.
bool SetsMomentum(const EngineParts& parts, int64_t steps_done,
                  absl::string_view option);

// COLLECTIVE.
absl::Status SetLearningRate(EngineParts* parts, double rate);
absl::Status ReportMetric(EngineParts* parts, double metric);

}  // namespace tessera
#endif  // ENGINE_PARTS_LEARNING_RATE_H_
