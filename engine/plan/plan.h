// Plan: which memory a run will need on each rank, before it is started: from
// one forward and backward of the module without computing
// (sharding/trace/trace.h), at every stage, for any number of ranks.
//
//   auto gpt = tessera::ConstructFake([] { return Gpt(options); });
//   auto report = tessera::Plan(**gpt, [&] { return (*gpt)->loss(x, y); },
//                               config, {.world_size = 64});
//   std::cout << report->ToString();
//
// Activations do not depend on the stage, so one trace serves all; what an
// engine holds besides follows from its own rules (units, layout, schedule,
// buckets), replayed along the trace. It is of a step in the midst of training:
// the first two gather later and copy more.
//
// Of activation_checkpointing its units, policy, every and budget_bytes, with
// what computing a unit again takes. That a module cannot be computed again
// (operators that have other bits, or say nothing of what they write) is not
// seen.
//
// What is offloaded to nvme takes no memory, and the buffers that it streams
// through do. Activations that are moved there are counted until they have left
// and from when they come back, as where the disk takes its time. Of the disk's
// time a step has what the rest of it does not hide.
//
// Not in it: a hierarchical gather (reshard_group_size). Beside it: what
// libtorch itself takes (base_bytes says it of this process), and transports
// (communication_bytes).
#ifndef ENGINE_PLAN_PLAN_H_
#define ENGINE_PLAN_PLAN_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "engine/api/engine_types.h"
#include "engine/plan/rates.h"
#include "engine/plan/replay/planned_memory.h"
#include "engine/plan/step_time.h"
#include "sharding/trace/construct_fake.h"  // IWYU pragma: export
#include "sharding/trace/tracer_options.h"

namespace tessera {

namespace proto {
class Config;
}

struct PlanOptions {
  int world_size = 1;
  // Of a rank. 0: sharding.memory_limit_bytes; if that is 0, too, nine tenths
  // of what this host has, by the ranks where they are on one host.
  int64_t memory_bytes = 0;
  // The ranks are on one host and have one working copy (over shm, that is the
  // default of sharding.shared_working_copy).
  bool shared_working_copy = false;
  // Of the group that is planned for, where communication.backend is "auto" and
  // the group is there; else empty.
  std::string backend;
  // They train on the CPU; else on a device whose memory is meant, and what is
  // offloaded to cpu is none of it.
  bool on_cpu = true;
  // As of Engine::Create: what decides which modules are units.
  EngineOptions::ModulePredicate is_unit, is_leaf, is_recomputed;
  // The same: which parameters have which states, and which are frozen.
  std::vector<ParameterGroup> param_groups;
  // As of Engine::Create: which says how many states there are. Without it
  // optimizer.type "Custom" is InvalidArgument.
  std::optional<CustomOptimizer> optimizer;
  // Of the ranks, for the time of a step.
  std::optional<Rates> rates;
  TracerOptions tracer;
};

// Where in a step the most is held.
struct PlanMoment {
  bool backward = false;
  std::string module;  // whose operator runs; "" before the first
  std::string op;      // "aten::mm"
};

struct StagePlan {
  int stage = 0;
  PlannedBytes between_steps;  // parameters, masters, optimizer
  PlannedBytes peak;
  PlanMoment at;
  // `peak` with activation_checkpointing.units "auto", where the configuration
  // names none.
  PlannedBytes recomputed_peak;
  // By one rank, in a step (its micro-batches included), of parameters and
  // gradients, where each piece goes around from rank to rank. Nothing is
  // gathered where the ranks of a host share their working copy.
  int64_t sent_bytes = 0;
  // By one rank, in a step, from its disk and to it.
  OffloadTraffic disk;
  StepSeconds seconds;  // of a step, as configured; 0 without rates
  int64_t units = 0;    // flat parameters
};

struct PlanReport {
  std::vector<StagePlan> stages;  // 0 to 3
  int configured_stage = -1;      // -1: auto
  int world_size = 1;
  int64_t memory_bytes = 0;  // of a rank
  int64_t micro_batch = 1;   // samples
  int64_t parameters = 0;    // elements
  int64_t trained = 0;       // of these
  int64_t buffer_bytes = 0;  // of the module, among the parameters below
  int64_t saved_bytes = 0;   // tensors between forward and backward
  int64_t flops = 0;         // of a micro-batch
  int64_t base_bytes = 0;    // resident in this process before the plan
  // That the ranks' transport takes besides, at most, with all groups of ranks;
  // of which backend. Of nccl an estimate, on the device.
  int64_t communication_bytes = 0;
  bool communication_is_estimated = false;
  std::string backend;
  double seconds = 0;          // that the plan took
  int64_t samples = 1;         // of a step, of all ranks
  std::optional<Rates> rates;  // that times are of
  // Its peak, by the formula of textbooks.
  struct {
    int64_t model = 0, optimizer = 0, gradients = 0, activations = 0;
  } formula;

  // The lowest stage that fits; -1: none does.
  int lowest_that_fits() const;
  // A table for people.
  std::string ToString() const;
};

// `loss`: the forward of a micro-batch to a scalar, as TakeTrace wants it;
// under autocast where the configuration has torch_autocast. `config` need not
// be resolved. LOCAL. InvalidArgument: the configuration, the units.
// FailedPrecondition: parameters belong to an engine, or an operator cannot be
// traced (the message names it, its module, and what to do).
absl::StatusOr<PlanReport> Plan(const torch::nn::Module& module,
                                const std::function<at::Tensor()>& loss,
                                const proto::Config& config,
                                const PlanOptions& options);

}  // namespace tessera
#endif  // ENGINE_PLAN_PLAN_H_
