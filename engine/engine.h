// Engine: trains one torch::nn::Module over the ranks of a group, with ZeRO
// stages 0 to 3, without a change to the module.
//
//   auto engine = tessera::Engine::Create(model, "zero3.json");
//   for (...) {
//     auto loss = model->forward(batch);        // any rank's own micro-batch
//     engine->Backward(loss);                   // gradients, reduced
//     engine->Step();                           // optimizer, at the boundary
//   }
//
// The module's parameters stay the tensors they were; what changes is the
// memory behind them. At stage 3 a parameter has values only while an operator
// (or backward) needs them: see docs/design.md, "Tagged storage".
//
// Sources: ZeRO (Rajbhandari et al., 2020), PyTorch FSDP (Zhao et al., 2023);
// configuration keys are DeepSpeed's.
//
// Threads: calls come from one thread at a time. COLLECTIVE calls must be made
// by all ranks, in the same order. A forward is COLLECTIVE where gathers at
// stage 3 are (nccl, several hosts with several ranks each,
// reshard_after_forward = a number); on one host and over gloo each rank may
// run what it likes, when it likes (docs/design.md, "One-sided gathers").
#ifndef ENGINE_ENGINE_H_
#define ENGINE_ENGINE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/api/engine_types.h"  // IWYU pragma: export
#include "engine/engine_scopes.h"     // IWYU pragma: export

namespace torch::nn {
class Module;
template <typename Contained>
class ModuleHolder;
}  // namespace torch::nn

namespace tessera {

namespace proto {
class Config;
}

class Monitor;  // engine/observe/monitor.h

class Engine {
 public:
  // Takes the module's parameters over: lays them out in units, shards what the
  // stage says, installs the hooks. `config` is a path (JSON, or text protobuf)
  // or a proto. The engine shares ownership of the module. With --plan_world
  // (comm/world/world.h) it prints a plan, and the process ends. COLLECTIVE.
  // Errors: InvalidArgument (config, a parameter of a kind that is not
  // supported, parameters or configurations that differ between ranks),
  // NotFound (path), ResourceExhausted. The module is then what it was.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(
      std::shared_ptr<torch::nn::Module> module, absl::string_view config_path,
      EngineOptions options = {});
  static absl::StatusOr<std::unique_ptr<Engine>> Create(
      std::shared_ptr<torch::nn::Module> module, const proto::Config& config,
      EngineOptions options = {});
  // The same for a holder, as TORCH_MODULE makes them: Create(gpt, "z3.json").
  template <typename M, typename C>
  static absl::StatusOr<std::unique_ptr<Engine>> Create(
      const torch::nn::ModuleHolder<M>& holder, const C& config,
      EngineOptions options = {}) {
    return Create(std::shared_ptr<torch::nn::Module>(holder.ptr()), config,
                  std::move(options));
  }

  // LOCAL: takes the parameters' memory away (an access names the parameter);
  // ranks that still gather are served in the background. Close() first to get
  // a whole, plain module back.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Gradients of `loss` (a scalar, mean over this rank's micro-batch) divided
  // by the accumulation count, averaged over ranks, added to the step's
  // gradients. A parameter that got no gradient on any rank in the whole step
  // is skipped by Step(), as libtorch does. An error on any rank is returned on
  // all and the micro-batch is discarded; the engine stays usable, unless the
  // failed rank had to leave the others inside of a collective (out of memory
  // there; at stage 3, a failure that not all ranks share). FailedPrecondition
  // if a rank called Step or ZeroGrad that another did not; with gradients in
  // .grad() that came from elsewhere (BackwardOptions::add_outside); with
  // accumulation, of a second Backward before Step (more_losses), or after a
  // zero_grad() of the module in the middle of a step. COLLECTIVE.
  //
  // Within a NoSyncScope, and with sharding.accumulation "local" before the
  // last micro-batch of a step, gradients stay on this rank, added up in
  // float32, and nothing is COLLECTIVE but stage 3's gathers and, where
  // something is float16, a small exchange of weights in the step's first
  // Backward (and the next ones, while all weights are 0); an error is then
  // returned here at once and on all ranks by the next Backward that reduces.
  absl::Status Backward(const at::Tensor& loss, BackwardOptions options = {});

  using NoSyncScope = tessera::NoSyncScope;
  using AutocastScope = tessera::AutocastScope;
  using SummonScope = tessera::SummonScope;

  // True while some rank has data, for loops over uneven input (PyTorch's
  // join): `while (*engine->AnyRankHasData(has_data))` with weight 0 on ranks
  // that have none. COLLECTIVE.
  absl::StatusOr<bool> AnyRankHasData(bool this_rank);

  // At an accumulation boundary: clips, steps the optimizer and zeroes the
  // gradients. Elsewhere: counts and does nothing. FailedPrecondition without a
  // Backward of this engine since the last Step, with gradients that did not
  // come through Backward or were not reduced, with parameters registered after
  // Create. OutOfRange if precision.max_skipped_in_a_row steps in a row were
  // skipped, or fp16's dynamic scale cannot be halved any more, with the first
  // parameters whose gradients were not finite. COLLECTIVE.
  //
  // On devices that have kernels for all of it it waits for no stream: whether
  // gradients overflowed, and their norm, only the device knows when it
  // returns. The next one (that steps the optimizer) takes what became of this
  // one, and returns its error, if it has any, instead of a step, for which the
  // gradients stay; it waits if the device has not come to this one's norm yet,
  // so a program is one step ahead at the most. An error of the last one is
  // Close's.
  absl::Status Step();
  // On such devices these wait for that norm, the first time they are asked; so
  // do step(), Gradient, SetGradient, and what saves, loads or closes. LOCAL.
  const StepReport& last_step() const;

  // Records all that this process holds from now on until the next optimizer
  // step ends; slower, since each allocation is looked at. LOCAL.
  void RecordMemory();
  // Writes what was recorded last, by RecordMemory or by memory_timeline of the
  // configuration: `prefix`RANK.json, for Perfetto, and `prefix`RANK.html, a
  // page that needs nothing else. FailedPrecondition if nothing was;
  // FileError's. LOCAL.
  absl::Status WriteMemoryTimeline(const std::string& prefix);

  // What the program adds to the metrics that the configuration's monitors
  // write: engine/observe/monitor.h, docs/monitoring.md. LOCAL.
  Monitor& monitor();

  // The rate of the steps from now on, for a schedule of the program's own: set
  // it before each Step, of all groups (SetOption: of one). A checkpoint keeps
  // it. The same on all ranks (checked:
  // InvalidArgument). FailedPrecondition without an optimizer, or if the
  // configuration has a scheduler. COLLECTIVE.
  absl::Status SetLearningRate(double rate);
  // What the scheduler ReduceLROnPlateau is to follow, a validation loss, say:
  // of torch's its step(metric). The steps from now on have the rate that
  // follows; NaN counts as no better than before. A checkpoint keeps what has
  // become of the reports. The same on all ranks (checked: InvalidArgument).
  // FailedPrecondition without such a scheduler. COLLECTIVE.
  absl::Status ReportMetric(double metric);

  // Of one group of parameters ("default": those of no other), an option that
  // the optimizer has ("weight_decay", "beta1", ...), for the steps from now
  // on; a checkpoint keeps it. `value`: of a flag 0 or 1. The same on all ranks
  // (checked). NotFound of a group, InvalidArgument of an option or value,
  // FailedPrecondition of the rate if the configuration has a scheduler, and of
  // what would change which states there are. COLLECTIVE.
  absl::Status SetOption(absl::string_view group, absl::string_view option,
                         double value);
  // As it is set, without a schedule. NotFound, InvalidArgument. LOCAL.
  absl::StatusOr<double> OptionOf(absl::string_view group,
                                  absl::string_view option) const;
  // The names of the groups, "default" first; none without an optimizer. LOCAL.
  std::vector<std::string> GroupNames() const;
  // The parameters of a group need no gradient from now on, and stay as they
  // are (no decay either); or need one again, with the states they had. The
  // same on all ranks (checked). NotFound; FailedPrecondition in the middle of
  // a step. COLLECTIVE.
  absl::Status SetFrozen(absl::string_view group, bool frozen);

  // The parameters become their exponential moving averages
  // (optimizer.params.ema_decay), on the shards: no rank holds more than it
  // did; or, of AdamWScheduleFree, which is to be evaluated there alone, its
  // averages: each rank holds its part of the masters once more then. For
  // evaluation, and to save them by FullStateDict or SaveSafetensors;
  // until SwapOutAverages nothing trains, and no checkpoint is saved. A
  // parameter that no step has changed stays as it is. FailedPrecondition;
  // ResourceExhausted, and nothing has changed. COLLECTIVE. PyTorch:
  // torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn.
  absl::Status SwapInAverages();
  absl::Status SwapOutAverages();

  // Drops all gradients, whoever made them, and the micro-batches counted since
  // the last optimizer step. zero_grad() of the module, or of an optimizer over
  // all its parameters, does the same before the next Backward or Step, if no
  // micro-batch has been counted. LOCAL, but make it on all ranks.
  absl::Status ZeroGrad();

  // The step's averaged gradient of a parameter so far, whole, in its shape;
  // undefined if it got none. COLLECTIVE.
  absl::StatusOr<at::Tensor> Gradient(absl::string_view name);
  // The step's gradients so far that are not finite, in the module's order, the
  // same on all ranks. FailedPrecondition before a Backward. COLLECTIVE.
  absl::StatusOr<std::vector<NonFiniteGradient>> NonFiniteGradients();
  // A whole copy of a parameter as operators see it. COLLECTIVE as a forward.
  absl::StatusOr<at::Tensor> Parameter(absl::string_view name);
  // A whole copy of what the optimizer keeps of it: float32 where the parameter
  // has 16 bits, unless data_types.master_dtype says otherwise. COLLECTIVE.
  absl::StatusOr<at::Tensor> Master(absl::string_view name);

  // A whole copy of an optimizer state of a parameter, by the name that
  // torch::optim gives it ("exp_avg", "momentum_buffer"), in the parameter's
  // shape (Adafactor's "row_var" and "col_var" have their own) and the state's
  // dtype. NotFound if the optimizer has no such;
  // FailedPrecondition of a frozen parameter. COLLECTIVE.
  absl::StatusOr<at::Tensor> OptimizerStateOf(absl::string_view name,
                                              absl::string_view state);

  // Puts `value`, whole and the same on all ranks (checked), in the place of
  // what Master, Gradient or OptimizerStateOf give; of any dtype. A master's
  // reaches the working copies of all ranks; a gradient must be there already.
  // InvalidArgument if the sizes are others, or the ranks' values differ;
  // FailedPrecondition. COLLECTIVE. DeepSpeed: safe_set_full_fp32_param,
  // safe_set_full_grad, safe_set_full_optimizer_state.
  absl::Status SetMaster(absl::string_view name, const at::Tensor& value);
  absl::Status SetGradient(absl::string_view name, const at::Tensor& value);
  absl::Status SetOptimizerState(absl::string_view name,
                                 absl::string_view state,
                                 const at::Tensor& value);

  // Whole copies of all masters and buffers, on the CPU. COLLECTIVE; gathers
  // one unit at a time. An error names what a rank could not copy, on all.
  absl::StatusOr<StateDict> FullStateDict(StateDictOptions options = {});

  // This rank's parts of all masters, in the engine's order; nothing of what it
  // does not own (below stage 1 a rank owns all). Nothing is sent. COLLECTIVE.
  absl::StatusOr<std::vector<ParameterShard>> ShardedStateDict();

  // Makes the units of these parameters (the module's own tensors) whole until
  // Close; they may be read and written, also through raw pointers, by all
  // ranks in the same way, or by rank 0 alone: there a parameter that is freed
  // between uses is so on the other ranks. PyTorch's summon_full_params,
  // DeepSpeed's GatheredParameters. Units that are never freed cost a copy of
  // them, those of a shared working copy another.
  //
  // Within, Backward, Step, and whatever reads or writes masters, are refused
  // (FailedPrecondition); no rank may use the units where gathers are
  // collectives and rank 0 holds them. InvalidArgument: a tensor that the
  // engine does not shard, another list on another rank; FailedPrecondition: a
  // unit that a Use or another scope holds; NotFound; ResourceExhausted.
  // COLLECTIVE.
  absl::StatusOr<SummonScope> Summon(const std::vector<at::Tensor>& parameters,
                                     SummonOptions options = {});
  absl::StatusOr<SummonScope> SummonByName(
      const std::vector<std::string>& names, SummonOptions options = {});

  // Parameters and buffers of a safetensors file, or of several in a folder
  // (Hugging Face's; `path` as of checkpoint/safetensors.h), become the
  // module's. Each rank reads its own part of the masters, and buffers whole;
  // values are cast to the masters' and buffers' dtypes. Optimizer states stay.
  // A tied parameter is looked for under all its names; the first that the file
  // has counts. The same file, and options, on all ranks; one that is replaced
  // or written to meanwhile is an error (Aborted, where it was).
  //
  // Names, sizes and dtypes are checked on all ranks before anything changes:
  // InvalidArgument lists what is missing, unexpected or does not fit; NotFound
  // and so on, DataLoss (a damaged file). A file that cannot be read to its end
  // later is an error, too, which says which units are loaded already; the
  // engine stays usable. COLLECTIVE.
  absl::StatusOr<LoadSafetensorsReport> LoadSafetensors(
      const std::string& path, LoadSafetensorsOptions options = {});

  // Writes masters and buffers as safetensors files of Hugging Face's kind
  // (model.safetensors, or several with an index) into `dir`, which all hosts
  // see. Each rank writes what it owns where it belongs, so nothing is
  // gathered; of tied tensors the first name counts. The same options on all
  // ranks. COLLECTIVE. Errors, after which `dir` has no new file: AlreadyExists
  // (it has safetensors files), InvalidArgument, Unimplemented (complex
  // numbers), FileError's.
  absl::Status SaveSafetensors(const std::string& dir,
                               const SaveSafetensorsOptions& options = {});

  // Frees memory between steps, for a program that needs it meanwhile
  // (generation, evaluation): the states move elsewhere, until Reload. All goes
  // on with the same bits, but slower: what is used comes back for the moment
  // of its use, unit by unit. What the configuration has put elsewhere is there
  // already. DeepSpeed's offload_states and reload_states.
  // InvalidArgument (device, nvme_path); Unimplemented: nvme for a module on a
  // device; FailedPrecondition: parameters while other ranks read them where
  // they are (sharding.served_gathers); ResourceExhausted, and the disk's
  // errors, after which some of the states have moved, and all can be used.
  // COLLECTIVE.
  absl::Status Offload(const OffloadStates& states = {});
  // All that Offload took is back. After an error some of it is. COLLECTIVE.
  absl::Status Reload();

  // ---- the schedule at stage 3; names as in DescribeUnits. NotFound. LOCAL,
  // but make the same calls on all ranks. ----

  enum class Pass { kForward, kBackward };
  // When `unit` is used in that pass, gathers `next` ahead, in this order and
  // as far as stage3_max_live_parameters allows, instead of what the record of
  // earlier steps says.
  absl::Status SetPrefetch(absl::string_view unit, Pass pass,
                           const std::vector<std::string>& next);
  // Whether `unit` is freed after its forward, instead of what the
  // configuration says (sharding.reshard_after_forward). To keep parameters
  // whole for a while, hold a tessera::Use on them.
  absl::Status SetReshardAfterForward(absl::string_view unit, bool reshard);

  // Makes parameters, optimizer states, step counts, buffers and each rank's
  // generators the checkpoint in folder `dir`, which all hosts see, in place of
  // the one there; `client_state` is this rank's own bytes, given back by
  // LoadCheckpoint. At every instant, and after any error, the folder holds a
  // whole checkpoint, the old or the new one (format, and how:
  // docs/checkpoint_format.md). COLLECTIVE; blocks until all is on the disk, or
  // with SaveOptions::async until training may go on. A save waits for the one
  // before, and returns its error, if there is one to be told, without
  // beginning.
  // With checkpoint.use_node_local_storage `dir` is each host's own, and must
  // hold no checkpoint.
  // Unavailable: another job is saving there; FailedPrecondition: within a
  // step, or a buffer that it cannot hold; FileError's (disk full, no
  // permission).
  absl::Status SaveCheckpoint(const std::string& dir,
                              absl::string_view client_state = "",
                              SaveOptions options = {});
  // Waits until no save is being written, and returns how the last one ended,
  // unless a call has told that already. A rank's end fails it, as a rank that
  // is silent for the collectives' timeout does. So does the destructor, whose
  // errors go to the log. LOCAL, but all ranks have to live as long.
  absl::Status WaitForCheckpoint();
  // Waits, too, but an error stays to be told. LOCAL.
  void SettleCheckpoint();
  // An async save is being written. LOCAL.
  bool saving_checkpoint() const;
  // checkpoint.use_node_local_storage. LOCAL.
  bool node_local_checkpoints() const;
  // Of the same model; world size, stage, shard groups and units may be others
  // than saved it. The report has the client_state of this rank (modulo the
  // saved world size). Parts of one, by other names: see the options, the same
  // on all ranks. What ranks have of their own (generators, differing buffers)
  // comes back where as many load as saved; otherwise generators stay, and
  // buffers are rank 0's. COLLECTIVE. Errors, after which nothing has changed:
  // NotFound, DataLoss naming file and tensor, Aborted (replaced while it was
  // read), FailedPrecondition naming what differs.
  absl::StatusOr<LoadCheckpointReport> LoadCheckpoint(
      const std::string& dir, LoadCheckpointOptions options = {});

  // Makes every parameter whole and plain again and takes all hooks away. The
  // module is then as if the engine had never been, but that frozen parameters
  // have the values that their working dtype could hold: they have no masters.
  // COLLECTIVE. After an error it may be called again, but for what the last
  // Step had to say (see Step), with which it is closed.
  absl::Status Close();

  // Model states held by this rank between uses, and what one replica of all
  // (DDP) would hold.
  StateBytes state_bytes() const;
  StateBytes replicated_state_bytes() const;
  // All ranks. LOCAL.
  const std::shared_ptr<Communicator>& communicator() const;
  int stage() const;
  // Complete, with what "auto" has become (but the stage, where model states
  // alone decided: see stage()).
  const proto::Config& config() const;
  // What "auto" has become, and why; "" unless the configuration says it.
  const std::string& auto_reason() const;
  // EngineOptions::plan, or what Create has planned; null: neither.
  const std::shared_ptr<const PlanReport>& plan() const;
  // Optimizer steps done; one that was skipped (last_step().skipped) does not
  // count, and `while (engine->step() < steps)` makes it again with the next
  // batch. Logs, monitors and checkpoints number steps so. LOCAL; may wait, see
  // last_step.
  int64_t step() const;
  // The number that step() has, unless the last step was skipped; and that of
  // steps done or skipped. Neither waits for the device. LOCAL.
  int64_t step_at_most() const;
  int64_t updates() const;
  // The unit that a parameter is in. NotFound. LOCAL.
  absl::StatusOr<std::string> UnitOf(absl::string_view parameter) const;
  // One line per unit: name, parameters, elements, and the first parameters
  // that do not lie below a module of that name; for logs.
  std::vector<std::string> DescribeUnits() const;

 private:
  class Impl;
  friend NoSyncScope;
  friend AutocastScope;
  explicit Engine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
#endif  // ENGINE_ENGINE_H_
