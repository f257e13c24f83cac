// Engine::Impl: takes a module over as a configuration says, owns what trains
// it and what reads and writes its values, and gives the module back. The work
// itself is in Trainer (engine/train/trainer.h), engine/values and
// engine/checkpoint.
#ifndef ENGINE_ENGINE_IMPL_H_
#define ENGINE_ENGINE_IMPL_H_

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "config/config.pb.h"
#include "engine/build/converted_buffers.h"
#include "engine/build/process_settings.h"
#include "engine/build/settings.h"
#include "engine/checkpoint/saver.h"
#include "engine/divide/pipeline_stages.h"
#include "engine/divide/tensor_parts.h"
#include "engine/engine.h"
#include "engine/model/engine_life.h"
#include "engine/model/optimization.h"
#include "engine/model/optimizer_groups.h"
#include "engine/model/sharded_model.h"
#include "engine/model/update_guard.h"
#include "engine/model/write_checks.h"
#include "engine/observe/monitor.h"
#include "engine/observe/step_observer.h"
#include "engine/train/pipeline_batches.h"
#include "engine/train/trainer.h"
#include "engine/values/named_access.h"
#include "sharding/partition/flat_plan.h"
#include "sharding/partition/partition.h"

namespace tessera {

class Engine::Impl {
 public:
  Impl(std::shared_ptr<torch::nn::Module> module, proto::Config config,
       std::shared_ptr<Communicator> comm, const EngineOptions& options);
  ~Impl();

  // Takes the module over; on an error the module is what it was. COLLECTIVE.
  absl::Status Build(const EngineOptions& options);
  // These calls are Engine's of the same names.
  absl::Status Close();
  absl::StatusOr<std::vector<at::Tensor>> BackwardBatch(
      const MicroBatchLoss& loss, const BatchOptions& options);
  absl::StatusOr<at::Tensor> EvalBatch(
      const std::function<absl::StatusOr<at::Tensor>()>& forward);
  absl::Status SaveCheckpoint(const std::string& dir,
                              absl::string_view client_state,
                              SaveOptions options);
  absl::Status SaveSafetensors(const std::string& dir,
                               const SaveSafetensorsOptions& options);
  absl::StatusOr<LoadCheckpointReport> LoadCheckpoint(
      const std::string& dir, const LoadCheckpointOptions& options);
  const std::string& auto_reason() const { return auto_reason_; }
  // `chose_stage`: this engine chose the stage, not the configuration or a
  // checkpoint.
  void set_auto(std::string reason, bool chose_stage) {
    auto_reason_ = std::move(reason);
    chose_stage_ = chose_stage;
  }

  const proto::Config& config() const { return config_; }
  const std::vector<TensorCut>& tensor_cuts() const { return cuts_; }
  const Settings& settings() const { return settings_; }
  const std::shared_ptr<const PlanReport>& plan() const { return plan_; }
  const ShardedModel& model() const { return model_; }
  const Optimization& optimization() const { return optimization_; }
  const EngineLife& life() const { return life_; }
  const std::shared_ptr<UpdateGuard>& guard() const { return guard_; }
  OptimizerGroups& groups() { return groups_; }
  WriteChecks& writes() { return writes_; }
  Trainer& trainer() { return trainer_; }
  Monitor& monitor() { return monitor_; }
  NamedAccess& access() { return access_; }
  Saver& saver() { return saver_; }

 private:
  // These are in engine_build.cc, engine_stage.cc and engine_copies.cc, in the
  // order in which Build calls them.
  absl::Status MoveTo(std::optional<at::Device> device);
  absl::StatusOr<Partition> Plan(const EngineOptions& options);
  absl::StatusOr<std::vector<bool>> AgreeOnModule(const Partition& partition,
                                                  const EngineOptions& options);
  absl::Status DivideSequences(std::vector<UnitPlan>* units);
  absl::Status DivideLayers(const EngineOptions& options,
                            std::vector<UnitPlan>* units);
  void LogStages(const PipelinePlan& plan) const;
  absl::Status MakeStages(const EngineOptions& options,
                          std::vector<UnitPlan>* units);
  absl::Status ChooseStage(absl::Span<const UnitPlan> units,
                           const std::vector<bool>& trainable);
  absl::StatusOr<std::vector<FlatPlan>> LayOut(
      absl::Span<const UnitPlan> units, const std::vector<bool>& trainable);
  void LimitLive(absl::Span<const FlatPlan> flats);
  absl::Status TakeOver(std::vector<FlatPlan> flats);
  absl::StatusOr<std::vector<FlatParameterOptions>> FlatParameterOptionsOfAll(
      absl::Span<const FlatPlan> flats);
  absl::Status ShareWorkingCopy(absl::Span<const FlatPlan> flats,
                                std::vector<FlatParameterOptions>* options);
  absl::Status ServeGathers(absl::Span<const FlatPlan> flats,
                            std::vector<FlatParameterOptions>* options);
  absl::StatusOr<std::shared_ptr<Communicator>> ReshardGroup();
  absl::Status MakeOptimizer();
  absl::Status MakePipeline();
  absl::Status MakeBufferSync();
  absl::Status MakeRecomputed(absl::Span<const UnitPlan> units);
  absl::Status MakeObserver(const EngineOptions& options);

  // engine_impl.cc
  TrainingState State();
  absl::Status GiveBack(const absl::Status& why);

  const proto::Config config_;  // complete, nothing is left to auto
  const std::shared_ptr<const PlanReport> plan_;  // EngineOptions::plan
  Settings settings_;
  ShardedModel model_;
  Optimization optimization_;
  EngineLife life_;
  // Shared with open scopes of Summon, which learn from it whether the engine
  // still exists.
  const std::shared_ptr<UpdateGuard> guard_;
  OptimizerGroups groups_;
  WriteChecks writes_;
  Trainer trainer_;
  NamedAccess access_;
  Saver saver_;
  Monitor monitor_;
  std::unique_ptr<StepObserver> observer_;  // null: nothing is to be seen
  std::string groups_chosen_;               // by Plan
  std::string auto_reason_;
  bool chose_stage_ = false;
  bool constructed_ = false;  // by ConstructSharded
  // In force from Create until Close.
  std::vector<TensorCut> cuts_;
  TensorParts parts_;
  PipelineStages stages_;
  std::unique_ptr<PipelineBatches> pipeline_;  // null: there is one stage
  ConvertedBuffers buffers_;
  ProcessSettings process_;
};

// Adds to an error that the module is not what it was.
absl::Status NotGivenBack(const absl::Status& why, const absl::Status& given);

}  // namespace tessera
#endif  // ENGINE_ENGINE_IMPL_H_
