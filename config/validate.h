// Completes and checks the sections of a configuration: each function completes
// one in place and adds what is wrong with it to `faults`. ResolveConfig
// (config/config.h) says what the result contains.
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

// Returns the number of ranks that have samples of their own. Adds a fault for
// each kind of parallelism that does not divide the ranks.
int DataParallelRanks(int world_size, const proto::Config& config,
                      Faults* faults);
// Completes the three batch sizes; `data_ranks` have samples of their own.
void ResolveBatch(int data_ranks, proto::Config* config, Faults* faults);
// Completes `pipeline`, if there is one. REQUIRES: ResolveBatch.
void ResolvePipeline(proto::Config* config, Faults* faults);
// Returns what tensor_parallel and pipeline ask for and this version does not
// support, beyond what MissingFeatures finds.
std::vector<std::string> MissingParallelism(const proto::Config& config);
// Completes clipping and scaling, and the other defaults of the top level.
void ResolveGradients(proto::Config* config, Faults* faults);
// Completes `optimizer`, if there is one.
void ResolveOptimizer(proto::Config* config, Faults* faults);
// Completes `scheduler`, if there is one, with the defaults of its type's
// parameters. REQUIRES: ResolveOptimizer.
void ResolveScheduler(proto::Config* config, Faults* faults);
// IsSchedule returns whether there is a schedule of that name;
// InsteadOfSchedule says what to do instead of another class of
// torch.optim.lr_scheduler.
bool IsSchedule(absl::string_view type);
std::string InsteadOfSchedule(absl::string_view type);
// Completes learning_rate_scaling, if there is one. REQUIRES: ResolveBatch.
void ResolveLearningRateScaling(proto::Config* config, Faults* faults);
// Completes zero_optimization, deprecated forms included, sharding, and aio.
void ResolveSharding(int world_size, proto::Config* config, Faults* faults);
// Checks what sharding.step_in_backward does not go with, and completes what it
// decides. REQUIRES: all of the above, and ResolvePrecision.
void ResolveStepInBackward(proto::Config* config, Faults* faults);
// Replaces DeepSpeed's other names of dtypes by those of config.proto.
void NameDtypes(proto::Config* config);
// Completes bf16, fp16, torch_autocast, precision, and the dtypes of gradients.
void ResolvePrecision(proto::Config* config, Faults* faults);
// Checks the section and leaves it as it is.
void CheckCommunication(const proto::Communication& section, Faults* faults);
// Checks the section and leaves it as it is.
void CheckTrace(int world_size, const proto::Trace& section, Faults* faults);
// Notes histograms that nothing writes.
void NoteHistograms(const proto::Config& config, Faults* faults);

}  // namespace tessera
#endif  // CONFIG_VALIDATE_H_
