// Arguments and results of Engine's calls: options, reports, state dicts. Users
// get them with engine/engine.h.
#ifndef ENGINE_API_ENGINE_TYPES_H_
#define ENGINE_API_ENGINE_TYPES_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/step_memory/held_memory.h"
#include "checkpoint/exchange/name_map.h"
#include "config/auto_values.h"
#include "optim/custom/custom_optimizer.h"  // IWYU pragma: export
#include "optim/gradients/non_finite_gradient.h"
#include "sharding/recompute/recompute_report.h"

namespace torch::nn {
class Module;
}

namespace tessera {

class Communicator;   // comm/communicator.h
class MetricsWriter;  // monitor/metrics_writer.h
struct PlanReport;    // engine/plan/plan.h

// Parameters that are stepped with options of their own.
struct ParameterGroup {
  std::string name;  // for messages, SetOption and checkpoints
  // The parameters that belong to the group: patterns of names, as in
  // optimizer.param_groups; classes of modules ("LayerNorm"), for their own
  // parameters; and those for which `claims` returns true.
  std::vector<std::string> parameters, modules;
  std::function<bool(const torch::nn::Module& module,
                     absl::string_view parameter, const at::Tensor& tensor)>
      claims;
  // Options that replace the configuration's: "lr", "weight_decay", "beta1",
  // "eps", ...
  std::vector<std::pair<std::string, double>> options;
  bool frozen = false;  // until Engine::SetFrozen
  // With the optimizer Muon: the group is stepped by Muon, not by AdamW.
  bool use_muon = false;
  // The group's own clipping, as in optimizer.param_groups; at least 0.
  std::optional<double> gradient_clipping;
  std::optional<double> adaptive_gradient_clipping;  // at least 0
};

// A parameter that is divided over the ranks of a tensor-parallel group
// (tensor_parallel.autotp_size), by the first of its names.
struct TensorCut {
  std::string parameter;
  int64_t dim = 0;  // that is cut; a rank has its slice of it
  // The dimension is that many equal groups, as the rows of one matrix for
  // queries, keys and values are 3, and a rank has its slice of each.
  int64_t groups = 1;
};

struct EngineOptions {
  // The group over which to shard; the world's (comm/world/world.h) if null.
  std::shared_ptr<Communicator> communicator;
  // Rank 0's parameters and buffers replace the others' at Create. Otherwise
  // both must be equal on all ranks (checked; InvalidArgument names the first
  // that differs), or parameters alone. Those of sharding.ignored_parameters
  // count as buffers, and with buffers_may_differ stay each rank's own.
  bool sync_from_rank0 = false;
  bool buffers_may_differ = false;
  // The device that the module is moved to (Module::to) before it is taken
  // over; unset: it stays where it is. Not for modules of ConstructSharded,
  // which are on the CPU.
  std::optional<at::Device> device;
  // Modules that are units of their own, and modules that are never split,
  // besides those that the configuration names (sharding.unit_classes,
  // zero_optimization.leaf_module). `path` is that of named_modules(). They
  // must be identical on all ranks.
  using ModulePredicate = std::function<bool(const torch::nn::Module& module,
                                             absl::string_view path)>;
  ModulePredicate is_unit;
  ModulePredicate is_leaf;
  // Modules whose forward is recomputed in backward, besides those that
  // activation_checkpointing.units names.
  ModulePredicate is_recomputed;
  // Groups besides those of the configuration (optimizer.param_groups); a
  // parameter is in one group at most. They must be identical on all ranks.
  std::vector<ParameterGroup> param_groups;
  // The program's own optimizer, for optimizer.type "Custom" and no other. Its
  // name and states must be identical on all ranks.
  std::optional<CustomOptimizer> optimizer;
  // Values for what a configuration's file leaves "auto".
  AutoValues auto_values;
  // The report of tessera::Plan on this module and configuration: out-of-memory
  // errors show it beside what was held, and say what to change. Create makes
  // it itself if `planned_loss` is given.
  std::shared_ptr<const PlanReport> plan;
  // The forward of a micro-batch of `samples` to a scalar loss, which makes its
  // inputs itself (torch::zeros, torch::randint: of the right sizes and dtypes,
  // the values do not matter). It is run on tensors without memory, a few
  // times, by each rank. Create plans with it, and so finds what the
  // configuration leaves to "auto": stage, micro-batch, and whether activations
  // are recomputed (engine/plan/auto_choice.h). Null: the stage is found
  // from model states alone, and the rest cannot be.
  std::function<at::Tensor(int64_t samples)> planned_loss;
  // With tensor_parallel.autotp_size above 1: the parameters that are divided;
  // all others are whole on each rank. Identical on all ranks. Unset: as
  // tensor_parallel.tp_plan says, or found by planned_loss.
  std::optional<std::vector<TensorCut>> tensor_cuts;
  // A checkpoint, or a folder of them (CheckpointManager's). If as many ranks
  // trained it, "auto" resolves to the values that it was trained with, so that
  // a resumed run makes the same choices. A missing checkpoint is not an error.
  // Rank 0 reads it.
  std::string resume_from;
  // The program's own writers of metrics, besides those that the configuration
  // enables: each gets what these get, once per step (docs/monitoring.md).
  // Rank 0's are used; other ranks need not have any. An error of one is logged
  // once, and training continues.
  std::vector<std::shared_ptr<MetricsWriter>> metrics_writers;
};

struct BackwardOptions {
  // Number of samples that the loss is the mean of, where ranks have unequal
  // numbers: the step's gradient is then the mean over all samples of all ranks
  // and micro-batches. Only the ratio of weights matters (docs/guide.md, "What
  // scales a gradient"). 0: this rank has no data left; it takes part with any
  // batch (gathers need it) and its gradients count as zero, whatever they are.
  // All ranks give a weight, in all micro-batches of a step, or none does.
  std::optional<double> weight;
  // Another loss of the same micro-batch follows before Step: their gradients
  // add up, each loss divided by the accumulation count. With weights their
  // samples count once, so all have the same weight. Without accumulation every
  // Backward before a Step is one of its losses, and this says nothing; except
  // with weights, where one that this does not join to the previous one is a
  // micro-batch of its own.
  bool more_losses = false;
  // Keeps the graph, for another Backward through it.
  bool retain_graph = false;
  // Adds the gradients in .grad() of parameters that came from elsewhere: a
  // bare loss.backward(), another engine's Backward, a gradient set by hand. It
  // is reduced as the loss's own, with its weight, but not divided by the
  // accumulation count.
  bool add_outside = false;
};

// The forward of a micro-batch of a step, 0 to gradient_accumulation_steps - 1,
// to its loss (Engine::Backward says what it may be), or an error of its data.
using MicroBatchLoss =
    std::function<absl::StatusOr<at::Tensor>(int64_t micro_batch)>;

struct BatchOptions {
  // BackwardOptions::weight of each micro-batch; empty: none has one.
  std::vector<double> weights;
};

// Updates of offloaded states on this rank.
struct OffloadReport {
  int64_t bytes_read = 0, bytes_written = 0;  // to and from nvme
  // Time with at least one request of that kind under way.
  absl::Duration reading, writing;
  // Time of the thread that updates states there: in the arithmetic, and
  // waiting for the disk with something to do.
  absl::Duration computing, stalled;
  // Units that were stepped before Step was called
  // (sharding.offload.early_step); on a device, which decides later, those of
  // the previous step.
  int64_t early_units = 0;
};

// Times of a step's micro-batches on this rank, a stage of a pipeline
// (pipeline.stages).
struct PipelineReport {
  int stage = 0, stages = 1;
  int64_t micro_batches = 0;
  // Time in forwards and backwards, without waits for values of other stages.
  absl::Duration forward, backward;
  absl::Duration waited;   // for these
  int64_t sent_bytes = 0;  // to other stages
  // The part of the time that was waited, and what it is where all stages take
  // equal times and values come at once: (p - 1) / (m + p - 1).
  double idle_share = 0, bubble = 0;
};

// The outcome of the last optimizer step.
struct StepReport {
  // A gradient was not finite (fp16, bf16.check_grad_overflow): nothing was
  // changed, and Engine::step() is what it was. precision.max_skipped_in_a_row
  // of them are an error of Step.
  bool skipped = false;
  int64_t skipped_steps = 0;  // so far, those before a checkpoint included
  double loss_scale = 1;      // by which its losses were multiplied
  double learning_rate = 0;   // of this step; 0 without an optimizer
  // Rate and norms of each group, "default" (parameters in no other group)
  // first.
  struct Group {
    std::string name;
    double learning_rate = 0;
    // As StepReport's, for groups with a gradient_clipping of their own; NaN
    // for the others.
    double grad_norm = std::numeric_limits<double>::quiet_NaN();
    double clipped_norm = std::numeric_limits<double>::quiet_NaN();
  };
  std::vector<Group> groups;
  // Global norm of the gradients before clipping by it and after; NaN where
  // nothing asks for it (gradient_clipping 0, neither fp16 nor bf16's check,
  // and no sharding.report_grad_norm). Gradients of groups with their own
  // clipping do not count.
  double grad_norm = 0;
  double clipped_norm = 0;
  // The gradients that were not finite, in the module's order: filled for a
  // skipped step if name_overflows (bf16, fp16) is set or skipping was an
  // error.
  std::vector<NonFiniteGradient> non_finite;
  // Recomputation in the step's forwards; empty without
  // activation_checkpointing.units.
  RecomputeReport recompute;
  // Offloaded updates since the previous step; of this step's own update it has
  // what was done when Step returned. Empty without offload.
  OffloadReport offload;
  // Times of the step's micro-batches; empty without pipeline.stages.
  PipelineReport pipeline;
  // Peak memory of the process from the end of the previous optimizer step (or
  // Create) to the end of this one: of what kind, when, and the activations of
  // each unit.
  StepMemoryReport memory;
};

// Which of this rank's model states Engine::Offload moves, and where to.
struct OffloadStates {
  bool parameters = true;  // shards of working copies (stage 3)
  bool masters = true;     // where they have memory of their own
  bool optimizer = true;   // the optimizer's states
  // "cpu": page-locked memory of the host, for a module on a device; "nvme": a
  // file in nvme_path, for a module on the CPU.
  std::string device = "cpu";
  // "": the configuration's. Where some states are on nvme already, no other
  // folder is allowed.
  std::string nvme_path;
};

// Parameters, then buffers, by the names of named_parameters() and
// named_buffers().
using StateDict = std::vector<std::pair<std::string, at::Tensor>>;
struct StateDictOptions {
  // Ranks other than 0 get an empty dict.
  bool rank0_only = false;
};

// A rank's part of a master: at::empty_strided(sizes, strides) has `values` in
// its memory from element `begin` on (row-major, unless the parameter is not).
struct ParameterShard {
  std::string name;                     // the first of a tied one's
  std::vector<int64_t> sizes, strides;  // of the whole
  int64_t begin = 0;
  at::Tensor values;  // [n], n >= 1; on the CPU, in the master's dtype
};

struct SummonOptions {
  // Only rank 0 holds the parameters whole; what it writes becomes all ranks'.
  bool rank0_only = false;
  // false: all writes are discarded.
  bool writeback = true;
};

struct SaveOptions {
  // The save returns once training may go on, and writes in the background.
  // Masters and buffers are copied at once; optimizer states are read where
  // they lie, and those not written yet are copied by the next Step (or
  // whatever else changes them). A save costs at most the time of a copy of the
  // state, and its memory until it is written. Unset: as checkpoint.async says.
  std::optional<bool> async;
  // The folder is each host's own. Unset: as checkpoint.use_node_local_storage
  // says.
  std::optional<bool> node_local;
  // Runs on rank 0, on a thread of its own, once the checkpoint is complete and
  // in place, for example to copy it away. The save ends on all ranks only when
  // it has returned; what it throws goes to the log. With node_local it runs on
  // one rank of each host, for which the other hosts do not wait.
  std::function<void()> after_commit;
  // Called on each rank with the result of the save, by the call of the engine
  // that learns it (the next save, a load, WaitForCheckpoint, the destructor).
  // WaitForCheckpoint returns the error of such a save, the next save does not.
  // Such a save also begins if an earlier one failed, whose error stays to be
  // returned.
  std::function<void(const absl::Status&)> on_end;
  // With node_local: a checkpoint that is in the folder is removed once all
  // ranks are ready to write; if the save fails after that, the folder has
  // none.
  bool replace = false;
  // The state of the CheckpointManager (its best metric) as text, identical on
  // all ranks; LoadCheckpointReport::manager_state returns it. Programs use
  // client_state.
  std::string manager_state;
  // The time by which the checkpoints of a run are ordered, in microseconds
  // since 1970, as rank 0 gives it; 0: now, by rank 0's clock.
  int64_t saved_unix_micros = 0;
};

struct LoadCheckpointOptions {
  // The folder is each host's own, see SaveOptions::node_local.
  std::optional<bool> node_local;
  // Loads parameters and buffers only: a warm start. Optimizer states and step
  // counts, step, learning rate, loss scale and generators stay this run's; the
  // checkpoint need have none. DeepSpeed: load_module_only.
  bool model_only = false;
  // Patterns of what to load: paths of parameters, buffers and modules
  // ("blocks.0", "*.weight"; '*' is any characters, '?' one); other parameters
  // and buffers stay. Step, learning rate, loss scale and generators are loaded
  // in any case, unless `model_only`. A tied parameter matches by any of its
  // names. Empty: all.
  std::vector<std::string> only;
  // Rules for what the checkpoint calls a parameter or buffer of the module;
  // one that it does not have ("-") stays. Transposing is not supported here.
  NameMap names;
  // Every parameter and buffer (of `only`) must be in the checkpoint, which
  // must have no others (unless `only` is set). false: what only one of the two
  // has is left alone, and named in the report. DeepSpeed: load_module_strict.
  bool strict = true;
};
struct LoadCheckpointReport {
  std::string client_state;   // this rank's
  std::string manager_state;  // SaveOptions::manager_state
  // The module's names that the checkpoint lacks, and "NAME (STATE)" for states
  // that begin now.
  std::vector<std::string> missing;
  std::vector<std::string> unexpected;  // the other way round
  int64_t bytes_read = 0;               // by this rank, with indices
  int world_size = 0, stage = 0;        // of the run that saved
};

struct LoadSafetensorsOptions {
  // Every parameter and buffer of the module must be in the file, and the file
  // must have no others. false: what only one of the two has is left alone, and
  // named in the report.
  bool strict = true;
  // The file's names are this and then the module's ("model."); other names are
  // ignored.
  std::string prefix;
  // Returns the file's name of a parameter or buffer of the module, without the
  // prefix; "" for one that is not loaded. Null: `names` decides.
  std::function<std::string(absl::string_view name)> file_name;
  // Rules for the file's names; they may also say that a matrix is transposed
  // there.
  NameMap names;
};
struct LoadSafetensorsReport {
  std::vector<std::string> missing;     // names of the module; not in the file
  std::vector<std::string> unexpected;  // the other way round
  int64_t bytes_read = 0;               // by this rank, elements only
};

struct SaveSafetensorsOptions {
  // The dtype of floating-point numbers in the files: "fp32" or "bf16", rounded
  // to nearest; "": as masters and buffers have them.
  std::string dtype;
  // Rules for the names of the module's tensors in the files.
  NameMap names;
  int64_t max_file_bytes = 5'000'000'000;  // a larger tensor has its own file
};

// Bytes of model states on this rank, between uses. Gradients count from a
// step's Backward on; where they are sharded, Step and ZeroGrad free them.
struct StateBytes {
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t optimizer = 0;
  int64_t total() const { return parameters + gradients + optimizer; }
};

}  // namespace tessera
#endif  // ENGINE_API_ENGINE_TYPES_H_
