// What Engine does, behind its public header.
#ifndef ENGINE_ENGINE_IMPL_H_
#define ENGINE_ENGINE_IMPL_H_

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "engine/engine.h"
#include "engine/settings.h"
#include "engine/setup/buffer_sync.h"
#include "engine/training_state.h"
#include "optim/adamw.h"
#include "optim/loss_scaler.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/flat/schedule.h"
#include "sharding/gradient/gradients.h"
#include "sharding/layout/flat_plan.h"

namespace tessera {

class Engine::Impl {
 public:
  Impl(std::shared_ptr<torch::nn::Module> module, proto::Config config,
       std::shared_ptr<Communicator> comm, const EngineOptions& options);
  ~Impl();

  // engine_build.cc
  absl::Status Build(const EngineOptions& options);
  absl::Status Close();

  // engine_training.cc
  absl::Status Backward(const at::Tensor& loss, const BackwardOptions& options);
  absl::Status Step();
  absl::Status ZeroGrad();
  absl::Status SetLearningRate(double rate);
  absl::StatusOr<bool> AnyRankHasData(bool this_rank);
  void ChangeNoSync(int by) { no_sync_ += by; }

  // engine_access.cc
  absl::StatusOr<at::Tensor> Gradient(absl::string_view name);
  absl::StatusOr<at::Tensor> Parameter(absl::string_view name);
  absl::StatusOr<at::Tensor> Master(absl::string_view name);
  absl::StatusOr<at::Tensor> GetState(absl::string_view name,
                                      OptimizerState which);
  absl::Status SetMaster(absl::string_view name, const at::Tensor& value);
  absl::Status SetGradient(absl::string_view name, const at::Tensor& value);
  absl::Status SetState(absl::string_view name, OptimizerState which,
                        const at::Tensor& value);
  absl::StatusOr<StateDict> FullStateDict(const StateDictOptions& options);
  absl::StatusOr<std::vector<ParameterShard>> ShardedStateDict();

  // engine_safetensors.cc
  absl::StatusOr<LoadSafetensorsReport> LoadSafetensors(
      const std::string& path, const LoadSafetensorsOptions& options);

  // engine_summon.cc
  absl::StatusOr<std::vector<at::Tensor>> Named(
      const std::vector<std::string>& names) const;
  absl::StatusOr<std::unique_ptr<SummonScope::State>> Summon(
      absl::StatusOr<std::vector<at::Tensor>> parameters,
      const SummonOptions& options);
  absl::Status CloseSummoned(SummonScope::State* state);
  static void DropSummoned(SummonScope::State* state);

  // engine_impl.cc
  absl::Status SetPrefetch(absl::string_view flat, Phase phase,
                           const std::vector<std::string>& next);
  absl::Status SetReshardAfterForward(absl::string_view flat, bool reshard);
  absl::StatusOr<std::string> UnitOf(absl::string_view parameter) const;
  absl::Status Save(const std::string& dir, absl::string_view client_state);
  absl::StatusOr<std::string> Load(const std::string& dir);
  StateBytes state_bytes() const;
  StateBytes replicated_state_bytes() const;
  std::vector<std::string> DescribeUnits() const;

  int stage() const { return stage_; }
  const std::string& stage_reason() const { return stage_reason_; }
  int64_t step() const { return step_; }
  const StepReport& last_step() const { return report_; }
  const Settings& settings() const { return settings_; }
  void NoteAutocast() { autocast_seen_ = true; }
  at::Device device() const {
    return flats_.empty() ? at::Device(at::kCPU) : flats_[0]->device();
  }

 private:
  struct ParameterRef {
    int flat, parameter;
  };
  absl::Status CheckOpen() const;
  absl::StatusOr<ParameterRef> Find(absl::string_view name) const;
  absl::StatusOr<FlatParameter*> FindUnit(absl::string_view name) const;
  TrainingState State();
  absl::StatusOr<at::Tensor> Announced(absl::StatusOr<at::Tensor> result);
  absl::StatusOr<at::Tensor> WholeCopy(const ParameterRef& place,
                                       const at::Tensor& owned,
                                       absl::string_view what) const;
  absl::StatusOr<ParameterRef> AgreeOnValue(absl::string_view name,
                                            const at::Tensor& value,
                                            absl::string_view where);
  absl::StatusOr<at::Tensor> OwnedState(absl::string_view name,
                                        const ParameterRef& place,
                                        OptimizerState which);

  absl::Status MoveTo(std::optional<at::Device> device);
  absl::StatusOr<std::vector<size_t>> UnitsOf(
      const std::vector<at::Tensor>& parameters) const;
  absl::Status CheckNotSummoned() const;
  absl::Status UpdateUnit(FlatParameter* flat, absl::string_view where);
  absl::Status CloseUnit(const SummonScope::State& state, FlatParameter* flat);

  struct Loading;
  absl::StatusOr<Loading> PlanLoading(const std::string& path,
                                      const LoadSafetensorsOptions& options);
  absl::Status LoadUnit(const Loading& loading, size_t u, bool* could_read);

  absl::StatusOr<Partition> Plan();
  absl::Status ChooseStage(absl::Span<const FlatPlan> flats);
  absl::StatusOr<std::vector<FlatParameterOptions>> FlatParameterOptionsOfAll(
      absl::Span<const FlatPlan> flats);
  absl::Status ShareWorkingCopy(absl::Span<const FlatPlan> flats,
                                std::vector<FlatParameterOptions>* options);
  absl::Status ServeGathers(std::vector<FlatParameterOptions>* options);
  absl::Status TakeOver(std::vector<FlatPlan> flats);
  absl::Status ConvertBuffers();
  absl::Status MakeBufferSync();
  void GiveBuffersBack();
  absl::Status GiveBack(const absl::Status& why);

  // engine_groups.cc
  absl::Status MakeGroups();
  absl::Status AgreeOverGroups(const absl::Status& mine,
                               absl::string_view where);
  absl::StatusOr<std::shared_ptr<Communicator>> ReshardGroup();
  absl::Status CheckReplicas();

  absl::Status CheckBackward(const at::Tensor& loss,
                             const BackwardOptions& options);
  bool ReducesNow() const;
  bool MayNest(const at::Tensor& loss) const;
  at::Tensor Seed(const at::Tensor& loss, std::optional<double> weight,
                  MicroBatch* micro_batch) const;
  absl::Status CheckStep();
  absl::Status CheckParametersKnown() const;
  absl::Status CheckWrites();
  absl::Status EnterUpdate(absl::Status mine, absl::string_view where,
                           FlatParameter* flat = nullptr);
  absl::Status AgreeOnUpdate(absl::Status mine, absl::string_view where);
  absl::Status MakeUpdatable();
  absl::Status EndUpdate();
  absl::Status AwaitOthers(const CommFuture& written);
  absl::Status FailUpdate(const absl::Status& status);
  absl::Status OptimizerStep();
  absl::Status CheckUpdate();
  void SetScheduledRate();
  absl::Status UpdateParameters();
  absl::Status Publish(size_t u, bool only_with_gradient, bool working_written);
  // What the step's gradients are divided by at last.
  double divisor() const;
  void EndStep();

  std::shared_ptr<torch::nn::Module> module_;
  proto::Config config_;
  std::shared_ptr<Communicator> comm_;  // all ranks
  // Those that the units are sharded over, comm_ itself or neighbours of it;
  // and those that hold the same part as this rank, null if none does.
  std::shared_ptr<Communicator> shard_group_, replicas_;
  Settings settings_;
  int stage_ = 0;
  std::string stage_reason_;
  std::shared_ptr<Schedule> schedule_;
  std::vector<std::shared_ptr<FlatParameter>> flats_;
  absl::flat_hash_map<std::string, ParameterRef> places_;
  // The module's parameters at Create, and FingerprintOfParameters of them.
  absl::flat_hash_set<const void*> known_parameters_;
  uint64_t parameters_fingerprint_ = 0;
  std::vector<std::pair<at::Tensor, at::ScalarType>> converted_buffers_;
  std::unique_ptr<BufferSync>
      buffer_sync_;  // null: buffers are each rank's own
  std::unique_ptr<Gradients> gradients_;
  std::unique_ptr<AdamW> optimizer_;
  std::optional<LossScaler> scaler_;
  StepReport report_;
  // By unit: written to since replicas were last seen to be equal, somewhere.
  std::vector<bool> unverified_replicas_;
  bool shares_working_copy_ = false;
  std::shared_ptr<ServedGathers> served_;  // null: gathers are collectives
  bool constructed_ = false;               // by ConstructSharded
  bool closed_ = false;
  // Units in open scopes of Summon; what tells these that this is there.
  absl::flat_hash_set<const FlatParameter*> summoned_;
  const std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
  int no_sync_ = 0;               // NoSyncScopes
  bool autocast_seen_ = false;    // since the last Step
  bool has_backward_ = false;     // since the last Step
  std::optional<bool> weighted_;  // this step's Backwards
  int64_t backwards_ = 0;         // since Create
  int64_t micro_steps_ = 0;       // Steps since the last optimizer step
  int64_t step_ = 0;
};

}  // namespace tessera
#endif  // ENGINE_ENGINE_IMPL_H_
