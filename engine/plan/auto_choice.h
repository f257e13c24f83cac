// Decides what a configuration leaves to "auto" by plans: of all ways of
// training that fit a rank's memory, the fastest.
//
//   zero_optimization.stage "auto"            0 to 3
//   train_micro_batch_size_per_gpu "auto"     a divisor of the samples that a
//   (auto_micro_batch)                        rank has in a step
//   activation_checkpointing.policy "auto"    nothing is computed again, or
//                                             "selective", or "full"
//   offload_optimizer.device "auto"           none; half of the states (at
//                                             stage 3), or all, in the host's
//                                             memory for a device, or on nvme
//   offload_param.device "auto"               none, or behind all states
#ifndef ENGINE_PLAN_AUTO_CHOICE_H_
#define ENGINE_PLAN_AUTO_CHOICE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "config/config.pb.h"
#include "engine/plan/plan.h"

namespace tessera {

// What is offloaded; a device is "" where the configuration sets it.
struct AutoTiers {
  std::string states, parameters;
  double ratio = 1;        // of states
  int64_t max_in_cpu = 0;  // elements of parameters
  int level = 0;           // 0: nothing; then from the host to the disk
};

// One way of training. Seconds are per step, with the same number of samples
// for all candidates.
struct AutoCandidate {
  int stage = 0;
  int64_t micro_batch = 1, micro_batches = 1;
  std::string policy;  // "": nothing is computed again
  AutoTiers tiers;
  int64_t peak_bytes = 0;
  StepSeconds seconds;
};

struct AutoChoice {
  AutoCandidate chosen;
  std::vector<AutoCandidate> others;  // in order of time
  proto::Config config;  // with what was chosen, and nothing left to auto
  std::string reason;    // for people
};

// The forward of a micro-batch of `samples` to a scalar, as Plan takes it.
using SampledLoss = std::function<at::Tensor(int64_t samples)>;

bool LeavesToAuto(const proto::Config& config);
// Returns the first key left to "auto" that must be decided before Plan can
// plan; null: none.
const char* KeyThatPlansDecide(const proto::Config& config);
// Chooses the fastest way that fits. Among ways within 2 % of its time it
// prefers less offload, then no recomputation over selective over full, then a
// lower stage, then a larger micro-batch. Without options.rates all take the
// same time. REQUIRES: `config` is resolved. LOCAL, and deterministic.
// ResourceExhausted, with the figures: nothing fits; else Plan's errors.
absl::StatusOr<AutoChoice> ChooseAuto(const torch::nn::Module& module,
                                      const SampledLoss& loss,
                                      const proto::Config& config,
                                      const PlanOptions& options);

// Returns `config` with a way in place of what it leaves to "auto", resolved.
absl::StatusOr<proto::Config> ConfigOfWay(const proto::Config& config,
                                          const AutoCandidate& way,
                                          int world_size);

// Returns, for people, what ChooseAuto chooses and the plan with that; `json`:
// an object {"auto": what was chosen and why, or null, "plan": PlanReport's}.
// Errors are ChooseAuto's and Plan's. LOCAL.
absl::StatusOr<std::string> PlanText(const torch::nn::Module& module,
                                     const SampledLoss& loss,
                                     const proto::Config& config,
                                     const PlanOptions& options,
                                     bool json = false);

}  // namespace tessera
#endif  // ENGINE_PLAN_AUTO_CHOICE_H_
