// What a configuration leaves to "auto", decided for an engine that is about to
// be made: as the checkpoint that the run goes on from was trained, or by a
// plan (engine/plan/auto_choice.h).
#ifndef ENGINE_AUTO_CONFIG_H_
#define ENGINE_AUTO_CONFIG_H_

#include <memory>
#include <string>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "comm/communicator.h"
#include "config/config.pb.h"
#include "engine/api/engine_types.h"

namespace tessera {

struct AutoConfig {
  proto::Config config;  // nothing is left to auto but, without planned_loss,
                         // the stage
  std::string reason;    // for people; "": nothing was decided
  std::shared_ptr<const PlanReport> plan;  // null: nothing was planned
  bool recomputes = true;  // false: what EngineOptions::is_recomputed means is
                           // not computed again either
};

// Decides what `config`, which is resolved, leaves to "auto". COLLECTIVE; calls
// options.planned_loss on each rank. Rank 0's measured rates decide, and the
// memory of the rank that has least. Errors, identical on all ranks:
// InvalidArgument (what needs planned_loss), Plan's, ResourceExhausted (nothing
// fits), those of reading options.resume_from.
absl::StatusOr<AutoConfig> DecideAuto(const torch::nn::Module& module,
                                      const proto::Config& config,
                                      const EngineOptions& options,
                                      Communicator* comm);

// Returns the memory of a rank that "auto" decides by: what the configuration
// allows, else what is there on `device`, the module's parameters included; the
// least of all ranks, identical on all. `where` is for messages. COLLECTIVE.
absl::StatusOr<int64_t> AgreeOnMemory(const torch::nn::Module& module,
                                      const proto::Config& config,
                                      at::Device device,
                                      absl::string_view where,
                                      Communicator* comm);

// Carries out --plan_world (comm/world/world.h): rank 0 prints what each of so
// many ranks would hold, and how long a step takes, to standard output; then
// the process ends with 0 (base/system/process_end.h). Returns an error,
// identical on all ranks: InvalidArgument (no planned_loss, the configuration),
// Plan's; Cancelled where a handler lets the process live. COLLECTIVE.
absl::Status PlanAndEnd(const torch::nn::Module& module,
                        const proto::Config& config,
                        const EngineOptions& options, int plan_world,
                        Communicator* comm);

}  // namespace tessera
#endif  // ENGINE_AUTO_CONFIG_H_
