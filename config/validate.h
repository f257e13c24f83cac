// The parts of a configuration: each function completes one in place and adds
// what is wrong with it to `faults`. ResolveConfig (config/config.h) says what
// comes out.
#ifndef CONFIG_VALIDATE_H_
#define CONFIG_VALIDATE_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "config/reader/faults.h"

namespace tessera {

namespace proto {
class Communication;
class Config;
class Trace;
}  // namespace proto

// The three batch sizes.
void ResolveBatch(int world_size, proto::Config* config, Faults* faults);
// Clipping and scaling, and the other defaults of the top level.
void ResolveGradients(proto::Config* config, Faults* faults);
// optimizer, if there is one.
void ResolveOptimizer(proto::Config* config, Faults* faults);
// scheduler, if there is one: its type's parameters get their defaults.
// REQUIRES: ResolveOptimizer.
void ResolveScheduler(proto::Config* config, Faults* faults);
// Whether it is one of ours; their names; of another class of
// torch.optim.lr_scheduler what to do instead.
bool IsSchedule(absl::string_view type);
const std::vector<std::string>& ScheduleNames();
std::string InsteadOfSchedule(absl::string_view type);
// learning_rate_scaling, if there is one. REQUIRES: ResolveBatch.
void ResolveLearningRateScaling(proto::Config* config, Faults* faults);
// zero_optimization, deprecated forms included, sharding, and aio.
void ResolveSharding(int world_size, proto::Config* config, Faults* faults);
// Gives dtypes the names that config.proto has of DeepSpeed's others.
void NameDtypes(proto::Config* config);
// bf16, fp16, torch_autocast, precision, and the dtypes of gradients.
void ResolvePrecision(proto::Config* config, Faults* faults);
// Leaves it as it is.
void CheckCommunication(const proto::Communication& section, Faults* faults);
// The same.
void CheckTrace(int world_size, const proto::Trace& section, Faults* faults);

}  // namespace tessera
#endif  // CONFIG_VALIDATE_H_
