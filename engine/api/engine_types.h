// What Engine's calls take and give: options, reports, state dicts. Users get
// them with engine/engine.h.
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
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/step_memory/held_memory.h"
#include "checkpoint/exchange/name_map.h"
#include "config/auto_values.h"
#include "engine/api/version.h"             // IWYU pragma: export
#include "optim/custom/custom_optimizer.h"  // IWYU pragma: export
#include "optim/gradients/non_finite_gradient.h"
#include "sharding/recompute/recompute_report.h"

namespace torch::nn {
class Module;
}

namespace tessera {

class Communicator;  // comm/communicator.h
struct PlanReport;   // engine/plan/plan.h

// Parameters that are stepped with options of their own.
struct ParameterGroup {
  std::string name;  // for messages, SetOption and checkpoints
  // Which: patterns of their names, as optimizer.param_groups has them; classes
  // of modules ("LayerNorm") whose own parameters are meant; and what the
  // program says of each.
  std::vector<std::string> parameters, modules;
  std::function<bool(const torch::nn::Module& module,
                     absl::string_view parameter, const at::Tensor& tensor)>
      claims;
  // In place of the configuration's: "lr", "weight_decay", "beta1", "eps", ...
  std::vector<std::pair<std::string, double>> options;
  bool frozen = false;  // until Engine::SetFrozen
  // Of the optimizer Muon: by Muon, and not by AdamW.
  bool use_muon = false;
  // As optimizer.param_groups has it; at least 0.
  std::optional<double> gradient_clipping;
  std::optional<double> adaptive_gradient_clipping;  // the same
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
  // Where the module is moved to (Module::to) before it is taken over; where it
  // is if unset. Not for modules of ConstructSharded, which are on the CPU.
  std::optional<at::Device> device;
  // Modules that are units of their own, and modules that are never parted,
  // besides those that the configuration names (sharding.unit_classes,
  // zero_optimization.leaf_module). `path` is that of named_modules(). The same
  // on all ranks.
  using ModulePredicate = std::function<bool(const torch::nn::Module& module,
                                             absl::string_view path)>;
  ModulePredicate is_unit;
  ModulePredicate is_leaf;
  // Modules whose forward is computed again in backward, besides those that
  // activation_checkpointing.units names.
  ModulePredicate is_recomputed;
  // Besides those of the configuration (optimizer.param_groups); a parameter is
  // of one group at most. The same on all ranks.
  std::vector<ParameterGroup> param_groups;
  // The program's own optimizer, with optimizer.type "Custom" and no other. Of
  // the same name and states on all ranks.
  std::optional<CustomOptimizer> optimizer;
  // For what a configuration's file leaves "auto".
  AutoValues auto_values;
  // What tessera::Plan said of this module and configuration: an error that
  // memory was refused shows it beside what was held, and says what to change.
  // Made by Create with `planned_loss`.
  std::shared_ptr<const PlanReport> plan;
  // The forward of a micro-batch of `samples` to a scalar loss, which makes its
  // inputs itself (torch::zeros, torch::randint: of the right sizes and dtypes,
  // the values do not matter). It is run on tensors without memory, a few
  // times, by each rank. Create plans with it, and so finds what the
  // configuration leaves to "auto": stage, micro-batch, and whether activations
  // are computed again (engine/plan/auto_choice.h). Null: the stage is found
  // from model states alone, and the rest cannot be.
  std::function<at::Tensor(int64_t samples)> planned_loss;
  // A checkpoint, or a folder of them (CheckpointManager's): where it was
  // trained by as many ranks, what is left to "auto" is what it was trained
  // with, so that a run that goes on does not change its mind. Nothing there:
  // no error. Rank 0 reads it.
  std::string resume_from;
};

struct BackwardOptions {
  // How many samples the loss is the mean of, where ranks have unequal numbers:
  // the step's gradient is then the mean over all samples of all ranks and
  // micro-batches. It only weighs: its size scales nothing (docs/guide.md,
  // "What scales a gradient"). 0: this rank has no data left; it takes part
  // with any batch (gathers need it) and its gradients count as zero, whatever
  // they are. All ranks give a weight, in all micro-batches of a step, or none
  // does.
  std::optional<double> weight;
  // Another loss of the same micro-batch follows before Step: their gradients
  // add up, each loss divided by the accumulation count. With weights their
  // samples count once, so all have the same weight. Without accumulation every
  // Backward before a Step is one of its losses, and this says nothing; except
  // with weights, where one that this does not join to the one before is a
  // micro-batch of its own.
  bool more_losses = false;
  // Keeps the graph, for another Backward through it.
  bool retain_graph = false;
  // Adds what .grad() of parameters has, which came from elsewhere: a bare
  // loss.backward(), another engine's Backward, a gradient set by hand. It is
  // reduced as the loss's own, with its weight, but not divided by the
  // accumulation count.
  bool add_outside = false;
};

// What updates of offloaded states did, of this rank.
struct OffloadReport {
  int64_t bytes_read = 0, bytes_written = 0;  // of nvme
  // With at least one request of that kind under way.
  absl::Duration reading, writing;
  // Of the thread that updates states there: in the arithmetic, and waiting for
  // the disk with something to do.
  absl::Duration computing, stalled;
  // Units that had been stepped when Step came (sharding.offload.early_step);
  // of a device, which decides later, those of the step before.
  int64_t early_units = 0;
};

// What became of the last optimizer step.
struct StepReport {
  // A gradient was not finite (fp16, bf16.check_grad_overflow): nothing was
  // changed, and Engine::step() is what it was. precision.max_skipped_in_a_row
  // of them are an error of Step.
  bool skipped = false;
  int64_t skipped_steps = 0;  // so far, those before a checkpoint included
  double loss_scale = 1;      // that its losses were multiplied with
  double learning_rate = 0;   // of this step; 0 without an optimizer
  // The same of each group, "default" first: of parameters that are in no
  // other.
  struct Group {
    std::string name;
    double learning_rate = 0;
    // Of groups with a gradient_clipping of their own, as those below; NaN of
    // the others.
    double grad_norm = std::numeric_limits<double>::quiet_NaN();
    double clipped_norm = std::numeric_limits<double>::quiet_NaN();
  };
  std::vector<Group> groups;
  // Global norm of the gradients before clipping by it and after; NaN where
  // nothing asks for it (gradient_clipping 0, neither fp16 nor bf16's check,
  // and no sharding.report_grad_norm). Without those of groups that have their
  // own.
  double grad_norm = 0;
  double clipped_norm = 0;
  // Of a step that was skipped, with name_overflows of bf16 or fp16, and where
  // that was an error: what was not finite, in the module's order.
  std::vector<NonFiniteGradient> non_finite;
  // Of the step's forwards; nothing without activation_checkpointing.units.
  RecomputeReport recompute;
  // Since the step before, so that of this step's own update it has what has
  // been done when Step returns. Nothing without offload.
  OffloadReport offload;
  // The peak of what the process held, from the end of the optimizer step
  // before (or Create) to that of this one, forwards and micro-batches in
  // between among it; what of, when, and the activations of each unit.
  StepMemoryReport memory;
};

// What Engine::Offload takes elsewhere, of this rank's model states.
struct OffloadStates {
  bool parameters = true;  // shards of working copies (stage 3)
  bool masters = true;     // where they have memory of their own
  bool optimizer = true;   // the optimizer's states
  // "cpu": page-locked memory of the host, of a module on a device; "nvme": a
  // file in nvme_path, of a module on the CPU.
  std::string device = "cpu";
  // "": the configuration's, which no other is to be where some states are on
  // nvme already.
  std::string nvme_path;
};

// Parameters, then buffers, by the names of named_parameters() and
// named_buffers().
using StateDict = std::vector<std::pair<std::string, at::Tensor>>;
struct StateDictOptions {
  // The other ranks get an empty one.
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
  // Rank 0 alone holds the parameters whole; what it writes becomes all ranks'.
  bool rank0_only = false;
  // false: what was written is taken back.
  bool writeback = true;
};

struct SaveOptions {
  // Returns when the state is safe from what training changes next, and writes
  // on behind it. Masters and buffers are copied at once; optimizer states are
  // read where they lie, and copied by the next Step (or what else changes
  // them) as far as they are not written by then: a save costs the time of a
  // copy of the state at most, and its memory until it is written. Unset: as
  // checkpoint.async says.
  std::optional<bool> async;
  // The folder is each host's own. Unset: as checkpoint.use_node_local_storage
  // says.
  std::optional<bool> node_local;
  // Runs on rank 0, on a thread of its own, once the checkpoint is in its place
  // to stay: for what is done with finished ones, such as copying them away.
  // The save ends with it on all ranks, and what it throws goes to the log. Of
  // folders of each host's own on one rank of each host, for which the other
  // hosts do not wait.
  std::function<void()> after_commit;
  // Called on each rank with how the save ended, by the call of the engine that
  // learns it (the next save, a load, WaitForCheckpoint, the destructor). Its
  // error is returned by WaitForCheckpoint, but not by the next save; and this
  // save begins whatever became of those before, whose errors stay to be told.
  std::function<void(const absl::Status&)> on_end;
  // With node_local: a checkpoint that is in the folder goes once all ranks are
  // ready to write; if the save fails after that, there is none.
  bool replace = false;
  // By which the checkpoints of a run are ordered: microseconds since 1970,
  // rank 0's; 0: now, by rank 0's clock.
  int64_t saved_unix_micros = 0;
};

struct LoadCheckpointOptions {
  // As SaveOptions::node_local.
  std::optional<bool> node_local;
  // Parameters and buffers alone: a warm start. Optimizer states and step
  // counts, step, learning rate, loss scale and generators stay this run's; the
  // checkpoint need have none. DeepSpeed: load_module_only.
  bool model_only = false;
  // What these mean alone, paths of parameters, buffers and modules
  // ("blocks.0", "*.weight"; '*' is any characters, '?' one); other parameters
  // and buffers stay. Step, learning rate, loss scale and generators are loaded
  // all the same, unless `model_only`. Of parameters that are one under several
  // names any counts. Empty: all.
  std::vector<std::string> only;
  // What the checkpoint calls a parameter or buffer of the module; one that it
  // does not have ("-") stays. Nothing can be transposed here.
  NameMap names;
  // Every parameter and buffer (of `only`) must be in the checkpoint, which
  // must have no others (unless `only` says what is looked at). false: what
  // only one of the two has is left alone, and named in the report. DeepSpeed:
  // load_module_strict.
  bool strict = true;
};
struct LoadCheckpointReport {
  std::string client_state;  // this rank's
  // Names of the module that are not there, and "NAME (STATE)" of states that
  // begin now.
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
  // The file's names are this and then the module's ("model."); what begins
  // otherwise is not looked at.
  std::string prefix;
  // What the file calls a parameter or buffer of the module, without the
  // prefix; "" for one that is not to be loaded. Null: what `names` say.
  std::function<std::string(absl::string_view name)> file_name;
  // Rules for the same; they may say, too, that a matrix is transposed there.
  NameMap names;
};
struct LoadSafetensorsReport {
  std::vector<std::string> missing;     // names of the module; not in the file
  std::vector<std::string> unexpected;  // the other way round
  int64_t bytes_read = 0;               // of elements, by this rank
};

struct SaveSafetensorsOptions {
  // Of floating-point numbers: "fp32" or "bf16", rounded to nearest; "": as
  // masters and buffers have them.
  std::string dtype;
  // What the files call the module's tensors.
  NameMap names;
  int64_t max_file_bytes = 5'000'000'000;  // a larger tensor has its own file
};

// Bytes of model states; between uses, on this rank. Gradients: of a step, from
// its Backward on; where they are sharded, Step and ZeroGrad free them.
struct StateBytes {
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t optimizer = 0;
  int64_t total() const { return parameters + gradients + optimizer; }
};

}  // namespace tessera
#endif  // ENGINE_API_ENGINE_TYPES_H_
