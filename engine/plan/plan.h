// Plan: predicts the memory that a run needs on each rank, before it is
// started: from a trace of one forward and backward without computing
// (sharding/trace/trace.h), at every stage, for any number of ranks.
//
//   auto gpt = tessera::ConstructFake([] { return Gpt(options); });
//   auto report = tessera::Plan(**gpt, [&] { return (*gpt)->loss(x, y); },
//                               config, {.world_size = 64});
//   std::cout << report->ToString();
//
// Activations do not depend on the stage, so one trace serves all; what an
// engine holds besides follows from its own rules (units, layout, schedule,
// buckets), replayed along the trace. It describes a step in the midst of
// training: the first two steps gather later and copy more.
//
// The plan covers activation_checkpointing's units, policy, every and
// budget_bytes, and the memory that recomputing a unit takes. It does not
// notice that a module cannot be recomputed (operators whose bits differ, or
// that do not declare what they write).
//
// States offloaded to nvme take no memory, the buffers that they stream through
// do. Activations moved there are counted until they have left and from when
// they come back, assuming a slow disk. A step's time includes the disk's time
// that the rest of the step does not hide.
//
// The plan does not cover hierarchical gathers (reshard_group_size). Memory of
// libtorch itself (base_bytes gives this process's) and of transports
// (communication_bytes) comes on top.
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
  // Memory of a rank. 0: sharding.memory_limit_bytes; if that is 0, too, nine
  // tenths of this host's memory, divided by the ranks if they are on one host.
  int64_t memory_bytes = 0;
  // The ranks are on one host and have one working copy (over shm, that is the
  // default of sharding.shared_working_copy).
  bool shared_working_copy = false;
  // The backend of the group that is planned for, where communication.backend
  // is "auto" and the group exists; else empty.
  std::string backend;
  // The ranks train on the CPU; else on a device: the plan is of its memory, in
  // which states offloaded to cpu do not count.
  bool on_cpu = true;
  // Engine::Create's options that decide which modules are units.
  EngineOptions::ModulePredicate is_unit, is_leaf, is_recomputed;
  // Engine::Create's groups: they decide which states parameters have, and
  // which are frozen.
  std::vector<ParameterGroup> param_groups;
  // Engine::Create's own optimizer, which says how many states there are.
  // Without it optimizer.type "Custom" is InvalidArgument.
  std::optional<CustomOptimizer> optimizer;
  // The ranks' rates, for the time of a step.
  std::optional<Rates> rates;
  TracerOptions tracer;
};

// The moment of a step at which most is held.
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
  // Bytes of parameters and gradients that one rank sends in a step (all
  // micro-batches), with ring algorithms. Nothing is gathered where the ranks
  // of a host share their working copy.
  int64_t sent_bytes = 0;
  // Bytes that one rank reads from its disk and writes to it in a step.
  OffloadTraffic disk;
  StepSeconds seconds;  // per step, as configured; 0 without rates
  int64_t units = 0;    // flat parameters
};

struct PlanReport {
  std::vector<StagePlan> stages;  // 0 to 3
  int configured_stage = -1;      // -1: auto
  int world_size = 1;
  int64_t memory_bytes = 0;  // of a rank
  int64_t micro_batch = 1;   // samples
  int64_t parameters = 0;    // elements
  int64_t trained = 0;       // elements that are trained
  int64_t buffer_bytes = 0;  // of the module, among the parameters below
  int64_t saved_bytes = 0;   // tensors between forward and backward
  int64_t flops = 0;         // of a micro-batch
  int64_t base_bytes = 0;    // resident in this process before the plan
  // The most bytes that the transport of all groups of ranks takes besides, and
  // its backend. For nccl it is an estimate, on the device.
  int64_t communication_bytes = 0;
  bool communication_is_estimated = false;
  std::string backend;
  double seconds = 0;          // that planning took
  int64_t samples = 1;         // per step, of all ranks
  std::optional<Rates> rates;  // that times are computed from
  // The peak by the textbook formula.
  struct {
    int64_t model = 0, optimizer = 0, gradients = 0, activations = 0;
  } formula;

  // Returns the lowest stage that fits; -1: none does.
  int lowest_that_fits() const;
  // Returns a table for people.
  std::string ToString() const;
  // Returns an object with the same: bytes, seconds, counts of elements; null
  // is what is not known.
  std::string ToJson() const;
};

// Plans all stages. `loss`: the forward of a micro-batch to a scalar, as
// TakeTrace takes it; it runs under autocast where the configuration has
// torch_autocast. `config` need not be resolved. LOCAL. InvalidArgument: the
// configuration, the units. FailedPrecondition: parameters belong to an engine,
// or an operator cannot be traced (the message names it, its module, and what
// to do).
absl::StatusOr<PlanReport> Plan(const torch::nn::Module& module,
                                const std::function<at::Tensor()>& loss,
                                const proto::Config& config,
                                const PlanOptions& options);

}  // namespace tessera
#endif  // ENGINE_PLAN_PLAN_H_
