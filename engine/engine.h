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
// run any unit at any time (docs/design.md, "One-sided gathers").
#ifndef ENGINE_ENGINE_H_
#define ENGINE_ENGINE_H_

#include <cstdint>
#include <functional>
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
  // Takes over the module's parameters: lays them out in units, shards them
  // according to the stage, and installs the hooks. The configuration is a path
  // (JSON, or text protobuf) or a proto. The engine shares ownership of the
  // module. With --plan_world (comm/world/world.h) it prints a plan and ends
  // the process. COLLECTIVE. Errors: InvalidArgument (config, a parameter of a
  // kind that is not supported, parameters or configurations that differ
  // between ranks), NotFound (path), ResourceExhausted. After an error the
  // module is unchanged.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(
      std::shared_ptr<torch::nn::Module> module, absl::string_view config_path,
      EngineOptions options = {});
  static absl::StatusOr<std::unique_ptr<Engine>> Create(
      std::shared_ptr<torch::nn::Module> module, const proto::Config& config,
      EngineOptions options = {});
  // Accepts a holder, as TORCH_MODULE makes them: Create(gpt, "z3.json").
  template <typename M, typename C>
  static absl::StatusOr<std::unique_ptr<Engine>> Create(
      const torch::nn::ModuleHolder<M>& holder, const C& config,
      EngineOptions options = {}) {
    return Create(std::shared_ptr<torch::nn::Module>(holder.ptr()), config,
                  std::move(options));
  }

  // Frees the parameters' memory (an access afterwards is an error that names
  // the parameter); ranks that still gather are served in the background. Call
  // Close() first to get a whole, plain module back. LOCAL.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Computes the gradients of `loss` (a scalar, mean over this rank's
  // micro-batch), divides them by the accumulation count, averages them over
  // ranks and adds them to the step's gradients. Step() skips a parameter that
  // got no gradient on any rank in the whole step, as libtorch does. An error
  // on any rank is returned on all and the micro-batch is discarded; the engine
  // stays usable, unless the failed rank had to leave the others inside of a
  // collective (out of memory there; at stage 3, a failure that not all ranks
  // share). FailedPrecondition: a rank called Step or ZeroGrad that another did
  // not; .grad() has gradients from elsewhere (BackwardOptions::add_outside);
  // with accumulation, a second Backward before Step (more_losses), or one
  // after the module's zero_grad() within a step. COLLECTIVE. With
  // sharding.step_in_backward only Step follows; an error may end the engine.
  //
  // Within a NoSyncScope, and with sharding.accumulation "local" before the
  // last micro-batch of a step, gradients stay on this rank, added up in
  // float32. Only stage 3's gathers are COLLECTIVE then and, where something is
  // float16, a small exchange of weights in the step's first Backward (and the
  // next ones, while all weights are 0). An error is returned here at once, and
  // on all ranks by the next Backward that reduces.
  absl::Status Backward(const at::Tensor& loss, BackwardOptions options = {});

  // Runs the micro-batches of a step, gradient_accumulation_steps of them:
  // `loss`, Backward and, except for the last, Step. Then call Step, or
  // TrainBatch, which does. Returns the losses of this rank's samples, without
  // a graph. With pipeline.stages it is the only way to train: each stage's
  // ranks call `loss` for all micro-batches, whose order is the schedule's, and
  // compute their own operators; the values of others must not be looked at
  // (FailedPrecondition; docs/guide.md, "Layers on ranks of their own"). After
  // an error with stages the engine trains no more; without them it does as
  // after one of Backward. Errors of Backward, and those that `loss` returns or
  // throws, of any rank.
  // COLLECTIVE. DeepSpeed's train_batch.
  absl::StatusOr<std::vector<at::Tensor>> BackwardBatch(
      const MicroBatchLoss& loss, const BatchOptions& options = {});
  absl::StatusOr<std::vector<at::Tensor>> TrainBatch(
      const MicroBatchLoss& loss, const BatchOptions& options = {});
  // Runs a forward without a graph. With pipeline.stages it is the only way to:
  // its result is then the same on all ranks of a pipeline. DeepSpeed's
  // eval_batch. COLLECTIVE as a forward; with stages over the pipeline.
  absl::StatusOr<at::Tensor> EvalBatch(
      const std::function<absl::StatusOr<at::Tensor>()>& forward);

  using NoSyncScope = tessera::NoSyncScope;
  using AutocastScope = tessera::AutocastScope;
  using SummonScope = tessera::SummonScope;

  // Returns true while some rank has data, for loops over uneven input
  // (PyTorch's join): `while (*engine->AnyRankHasData(has_data))` with weight 0
  // on ranks that have none. COLLECTIVE.
  absl::StatusOr<bool> AnyRankHasData(bool this_rank);

  // Clips, steps the optimizer and zeroes the gradients, at an accumulation
  // boundary; elsewhere it only counts the micro-batch. FailedPrecondition: no
  // Backward of this engine since the last Step, gradients that did not come
  // through Backward or were not reduced, parameters registered after Create.
  // OutOfRange: precision.max_skipped_in_a_row steps in a row were skipped, or
  // fp16's dynamic scale cannot be halved any more; it names the first
  // parameters whose gradients were not finite. COLLECTIVE.
  //
  // Where the device has all the kernels, Step never waits for a stream: when
  // it returns, only the device knows the norm and whether gradients
  // overflowed. The next Step (that steps the optimizer) learns the outcome of
  // this one. If that is an error, it returns the error instead of making a
  // step, and keeps the gradients. It waits if the device has not computed this
  // one's norm yet, so a program is at most one step ahead. Close returns an
  // error of the last Step.
  absl::Status Step();
  // Reports the last optimizer step. On such devices the first call after a
  // Step waits for its norm; so do step(), Gradient, SetGradient, and calls
  // that save, load or close. LOCAL.
  const StepReport& last_step() const;

  // Records this process's allocations from now on until the end of the next
  // optimizer step; slower, since each allocation is looked at. LOCAL.
  void RecordMemory();
  // Writes the last recording (RecordMemory, or the configuration's
  // memory_timeline): `prefix`RANK.json for Perfetto, and `prefix`RANK.html, a
  // self-contained page. Errors: FailedPrecondition if nothing was recorded;
  // FileError's. LOCAL.
  absl::Status WriteMemoryTimeline(const std::string& prefix);

  // What a program adds metrics to: engine/observe/monitor.h. LOCAL.
  Monitor& monitor();

  // Sets the learning rate of all groups from now on (SetOption: of one group),
  // for a schedule of the program's own: call it before each Step. A checkpoint
  // keeps it. It must be identical on all ranks (checked: InvalidArgument).
  // FailedPrecondition without an optimizer, or if the configuration has a
  // scheduler. COLLECTIVE.
  absl::Status SetLearningRate(double rate);
  // Reports a metric, such as a validation loss, to the scheduler
  // ReduceLROnPlateau: its step(metric) in PyTorch. Steps from now on have the
  // resulting rate; NaN counts as no improvement. A checkpoint keeps the
  // scheduler's state. The metric must be identical on all ranks (checked:
  // InvalidArgument). FailedPrecondition without such a scheduler. COLLECTIVE.
  absl::Status ReportMetric(double metric);

  // Sets an option of the optimizer ("weight_decay", "beta1", ...) from now on,
  // for one group of parameters ("default": those in no other). A checkpoint
  // keeps it. `value`: 0 or 1 for a flag. The arguments must be identical on
  // all ranks (checked). NotFound: the group; InvalidArgument: the option or
  // value; FailedPrecondition: the rate if the configuration has a scheduler,
  // or an option that would change which states there are. COLLECTIVE.
  absl::Status SetOption(absl::string_view group, absl::string_view option,
                         double value);
  // Returns an option as set, without a schedule. NotFound, InvalidArgument.
  // LOCAL.
  absl::StatusOr<double> OptionOf(absl::string_view group,
                                  absl::string_view option) const;
  // Returns the groups, "default" first; none without an optimizer. LOCAL.
  std::vector<std::string> GroupNames() const;
  // Freezes the parameters of a group: from now on they need no gradient and do
  // not change (no decay either); or unfreezes them, with the states they had.
  // The arguments must be identical on all ranks (checked). NotFound;
  // FailedPrecondition in the middle of a step. COLLECTIVE.
  absl::Status SetFrozen(absl::string_view group, bool frozen);

  // Exchanges the parameters with their exponential moving averages
  // (optimizer.params.ema_decay), on the shards and without more memory; for
  // AdamWScheduleFree, with its averages, which are the values to evaluate;
  // each rank then holds its part of the masters twice. For evaluation, and for
  // saving by FullStateDict or SaveSafetensors; until SwapOutAverages, training
  // and checkpoints are refused. A parameter that no step has changed stays as
  // it is. FailedPrecondition; ResourceExhausted, after which nothing has
  // changed. COLLECTIVE. PyTorch: torch.optim.swa_utils.AveragedModel with
  // get_ema_multi_avg_fn.
  absl::Status SwapInAverages();
  absl::Status SwapOutAverages();

  // Drops all gradients, also those made by others, and the micro-batches
  // counted since the last optimizer step. zero_grad() of the module, or of an
  // optimizer over all its parameters, does the same before the next Backward
  // or Step, if no micro-batch has been counted. LOCAL; call it on all ranks.
  absl::Status ZeroGrad();

  // Returns the step's averaged gradient of a parameter so far, whole, in its
  // shape; undefined if it got none. COLLECTIVE.
  absl::StatusOr<at::Tensor> Gradient(absl::string_view name);
  // Returns the step's gradients so far that are not finite, in the module's
  // order, identical on all ranks. FailedPrecondition before a Backward.
  // COLLECTIVE.
  absl::StatusOr<std::vector<NonFiniteGradient>> NonFiniteGradients();
  // Returns a whole copy of a parameter as operators see it. COLLECTIVE as a
  // forward.
  absl::StatusOr<at::Tensor> Parameter(absl::string_view name);
  // Returns a whole copy of a parameter's master, the optimizer's values:
  // float32 where the parameter has 16 bits, unless data_types.master_dtype
  // says otherwise. COLLECTIVE.
  absl::StatusOr<at::Tensor> Master(absl::string_view name);

  // Returns a whole copy of an optimizer state of a parameter, by the name that
  // torch::optim gives it ("exp_avg", "momentum_buffer"), in the parameter's
  // shape (Adafactor's "row_var" and "col_var" have their own) and the state's
  // dtype. NotFound: the optimizer has no such state; FailedPrecondition: a
  // frozen parameter. COLLECTIVE.
  absl::StatusOr<at::Tensor> OptimizerStateOf(absl::string_view name,
                                              absl::string_view state);

  // Replaces what Master, Gradient or OptimizerStateOf return by `value`,
  // whole, of any dtype and identical on all ranks (checked). A master's value
  // reaches the working copies of all ranks; a gradient must exist already.
  // InvalidArgument: other sizes, or values that differ between ranks;
  // FailedPrecondition. COLLECTIVE. DeepSpeed: safe_set_full_fp32_param,
  // safe_set_full_grad, safe_set_full_optimizer_state.
  absl::Status SetMaster(absl::string_view name, const at::Tensor& value);
  absl::Status SetGradient(absl::string_view name, const at::Tensor& value);
  absl::Status SetOptimizerState(absl::string_view name,
                                 absl::string_view state,
                                 const at::Tensor& value);

  // Returns whole copies of all masters and buffers, on the CPU. COLLECTIVE;
  // gathers one unit at a time. An error, on all ranks, names what a rank could
  // not copy.
  absl::StatusOr<StateDict> FullStateDict(StateDictOptions options = {});

  // Returns the parts of all masters that this rank owns (at stage 0: all), in
  // the engine's order. Nothing is sent. COLLECTIVE.
  absl::StatusOr<std::vector<ParameterShard>> ShardedStateDict();

  // Makes the units of these parameters (the module's own tensors) whole until
  // the scope's Close. They may be read and written, also through raw pointers:
  // by all ranks in the same way, or with rank0_only by rank 0 only, while on
  // the other ranks parameters that are freed between uses stay freed.
  // PyTorch's summon_full_params, DeepSpeed's GatheredParameters. Units that
  // are never freed cost a copy of them, those of a shared working copy
  // another.
  //
  // While the scope is open, Backward, Step, and whatever reads or writes
  // masters, return FailedPrecondition; where gathers are collectives and only
  // rank 0 holds the units, no rank may use them. InvalidArgument: a tensor
  // that the engine does not shard, a list that differs between ranks;
  // FailedPrecondition: a unit that a Use or another scope holds; NotFound;
  // ResourceExhausted. COLLECTIVE.
  absl::StatusOr<SummonScope> Summon(const std::vector<at::Tensor>& parameters,
                                     SummonOptions options = {});
  absl::StatusOr<SummonScope> SummonByName(
      const std::vector<std::string>& names, SummonOptions options = {});

  // Loads parameters and buffers from a safetensors file, or from several in a
  // folder (Hugging Face's; `path`: see checkpoint/safetensors.h). Each rank
  // reads its own part of the masters, and buffers whole; values are cast to
  // the masters' and buffers' dtypes. Optimizer states stay. A tied parameter
  // is looked up under all its names; the first that the file has is used. File
  // and options must be identical on all ranks; a file that is replaced or
  // written to meanwhile is an error (Aborted, where it was replaced).
  //
  // Names, sizes and dtypes are checked on all ranks before anything changes.
  // Errors: InvalidArgument lists what is missing, unexpected or does not fit;
  // NotFound and so on, DataLoss (a damaged file). An error while the values
  // are read says which units are loaded already; the engine stays usable.
  // COLLECTIVE.
  absl::StatusOr<LoadSafetensorsReport> LoadSafetensors(
      const std::string& path, LoadSafetensorsOptions options = {});

  // Writes masters and buffers as safetensors files of Hugging Face's kind
  // (model.safetensors, or several with an index) into `dir`, which all hosts
  // see. Each rank writes what it owns at its place in the files, so nothing is
  // gathered; a tied tensor is saved under its first name. Options must be
  // identical on all ranks. COLLECTIVE. Errors, after which `dir` has no new
  // file: AlreadyExists (it has safetensors files), InvalidArgument,
  // Unimplemented (complex numbers), FileError's.
  absl::Status SaveSafetensors(const std::string& dir,
                               const SaveSafetensorsOptions& options = {});

  // Moves states out of memory until Reload, for a program that needs the
  // memory between steps (generation, evaluation). Training may continue with
  // the same bits, but slower: each unit's states come back only while they are
  // used. States that the configuration offloads stay where they are.
  // DeepSpeed's offload_states and reload_states. InvalidArgument (device,
  // nvme_path); Unimplemented: nvme for a module on a device;
  // FailedPrecondition: parameters while other ranks read them where they are
  // (sharding.served_gathers); ResourceExhausted and the disk's errors, after
  // which some states have moved, and all can be used. COLLECTIVE.
  absl::Status Offload(const OffloadStates& states = {});
  // Brings back what Offload moved; after an error, some of it. COLLECTIVE.
  absl::Status Reload();

  // ---- The schedule at stage 3. Names are those of DescribeUnits. NotFound.
  // LOCAL, but make the same calls on all ranks. ----

  enum class Pass { kForward, kBackward };
  // Makes a use of `unit` in `pass` gather the units `next` ahead, in this
  // order and as far as stage3_max_live_parameters allows, instead of those
  // that earlier steps used next.
  absl::Status SetPrefetch(absl::string_view unit, Pass pass,
                           const std::vector<std::string>& next);
  // Sets whether `unit` is freed after its forward, in place of the
  // configuration's sharding.reshard_after_forward. To keep parameters whole
  // for a while, hold a tessera::Use on them.
  absl::Status SetReshardAfterForward(absl::string_view unit, bool reshard);

  // Saves parameters, optimizer states, step counts, buffers and each rank's
  // generators as the checkpoint in folder `dir`, which all hosts see; it
  // replaces a checkpoint that is there. `client_state` is this rank's own
  // bytes, given back by LoadCheckpoint. At every instant, and after any error,
  // the folder holds a whole checkpoint, the old or the new one
  // (docs/checkpoint_format.md). COLLECTIVE; blocks until all is on the disk,
  // or with SaveOptions::async until training may go on. A save waits for the
  // previous one; if that failed and no call has returned its error yet, this
  // call returns it and does not begin. With checkpoint.use_node_local_storage
  // `dir` is each host's own, and must hold no checkpoint. Unavailable: another
  // job is saving there; FailedPrecondition: within a step, or a buffer that a
  // checkpoint cannot hold; FileError's (disk full, no permission).
  absl::Status SaveCheckpoint(const std::string& dir,
                              absl::string_view client_state = "",
                              SaveOptions options = {});
  // Waits until no save is being written, and returns how the last one ended,
  // unless a call has returned that already. A save fails if a rank ends, or is
  // silent for the collectives' timeout. The destructor waits, too; its errors
  // go to the log. LOCAL, but all ranks have to live until then.
  absl::Status WaitForCheckpoint();
  // As WaitForCheckpoint; leaves its error for a later call to return. LOCAL.
  void SettleCheckpoint();
  // Whether an async save is being written. LOCAL.
  bool saving_checkpoint() const;
  // Whether checkpoint.use_node_local_storage is set. LOCAL.
  bool node_local_checkpoints() const;
  // Loads a checkpoint of the same model; world size, stage, shard groups and
  // units may differ from the run that saved it. The options, identical on all
  // ranks, select parts of it and map names. The report has the client_state of
  // this rank (modulo the saved world size). State that differs between ranks
  // (generators, differing buffers) is restored if as many ranks load as saved;
  // otherwise generators stay, and buffers are rank 0's. COLLECTIVE. Errors,
  // after which nothing has changed: NotFound, DataLoss naming file and tensor,
  // Aborted (replaced while it was read), FailedPrecondition naming what
  // differs.
  absl::StatusOr<LoadCheckpointReport> LoadCheckpoint(
      const std::string& dir, LoadCheckpointOptions options = {});

  // Makes every parameter whole and plain again and removes all hooks. The
  // module is then as if there had never been an engine, except that frozen
  // parameters have values rounded to their working dtype, as they have no
  // masters. COLLECTIVE. If it returns an error, it may be called again, unless
  // the error is the last Step's own (see Step): then the engine is closed.
  absl::Status Close();

  // Return the bytes of model states on this rank, and of a replica (DDP).
  StateBytes state_bytes() const;
  StateBytes replicated_state_bytes() const;
  // The group of all ranks of this engine. LOCAL.
  const std::shared_ptr<Communicator>& communicator() const;
  // How many ranks have samples of their own, and which of them this one is:
  // for samplers and loaders. Those of a tensor-parallel group are one. LOCAL.
  int data_world_size() const;
  int data_rank() const;
  // The stage of this rank, of a pipeline (pipeline.stages), and how many there
  // are; 0 and 1 without one. LOCAL.
  int pipeline_stage() const;
  int pipeline_stages() const;
  // The parameters that are divided (EngineOptions::tensor_cuts). LOCAL.
  const std::vector<TensorCut>& tensor_cuts() const;
  int stage() const;
  // The complete configuration, with the values chosen for "auto" (except the
  // stage, if model states alone decided it: see stage()).
  const proto::Config& config() const;
  // The values chosen for "auto", and why; "" if nothing was "auto".
  const std::string& auto_reason() const;
  // EngineOptions::plan, or what Create has planned; null: neither.
  const std::shared_ptr<const PlanReport>& plan() const;
  // Returns the number of optimizer steps done. A skipped step
  // (last_step().skipped) does not count, so `while (engine->step() < steps)`
  // repeats it with the next batch. Logs, monitors and checkpoints use this
  // number. LOCAL; may wait, see last_step.
  int64_t step() const;
  // Return step() as if the last step was not skipped, and the number of steps
  // done or skipped. Neither waits for the device. LOCAL.
  int64_t step_at_most() const;
  int64_t updates() const;
  // Returns the name of the unit that a parameter is in. NotFound. LOCAL.
  absl::StatusOr<std::string> UnitOf(absl::string_view parameter) const;
  // Returns one line per unit, for logs: name, parameters, elements, and the
  // first parameters that do not lie below a module of that name.
  std::vector<std::string> DescribeUnits() const;

 private:
  class Impl;
  friend NoSyncScope;
  friend AutocastScope;
  friend EvalScope;
  friend class CheckpointManager;  // which calls this:
  void NoteManaged();
  explicit Engine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
#endif  // ENGINE_ENGINE_H_
