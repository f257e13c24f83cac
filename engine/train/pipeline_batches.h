// PipelineBatches: the micro-batches of a step over the stages of a pipeline,
// in the order that pipeline.schedule says. engine/engine.h documents
// BackwardBatch and EvalBatch.
//
// Threads: as the engine's.
#ifndef ENGINE_TRAIN_PIPELINE_BATCHES_H_
#define ENGINE_TRAIN_PIPELINE_BATCHES_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/api/engine_types.h"
#include "engine/model/sharded_model.h"
#include "parallel/pipeline/schedule.h"
#include "parallel/pipeline/staged_run.h"

namespace tessera {

class Trainer;

class PipelineBatches {
 public:
  // `model` outlives this; `parameters` are all of its module's. COLLECTIVE
  // over the job. Errors of Communicator::ServeShards.
  static absl::StatusOr<std::unique_ptr<PipelineBatches>> Create(
      const ShardedModel* model, PipelineSchedule schedule, int micro_batches,
      const std::vector<StagedParameter>& parameters);

  // Runs all micro-batches forward and backward, and returns their losses.
  // After an error all calls return FailedPrecondition: messages of the batch
  // may lie there still. COLLECTIVE.
  absl::StatusOr<std::vector<at::Tensor>> Backward(const MicroBatchLoss& loss,
                                                   const BatchOptions& options,
                                                   Trainer* trainer);
  // Runs `forward` without a graph; its result is whole on all ranks.
  // COLLECTIVE over the pipeline.
  absl::StatusOr<at::Tensor> Evaluate(
      const std::function<absl::StatusOr<at::Tensor>()>& forward);

 private:
  PipelineBatches(const ShardedModel* model, bool one_way,
                  std::vector<PipelineAction> actions, int micro_batches,
                  const std::vector<StagedParameter>& parameters,
                  std::shared_ptr<StageLinks> links);
  // A micro-batch from its forward on.
  struct MicroBatchRun {
    at::Tensor loss;
    bool autocast = false;  // ran within an AutocastScope
  };
  absl::Status RunForward(int micro_batch, const MicroBatchLoss& loss,
                          MicroBatchRun* run, Trainer* trainer);
  absl::Status RunBackward(int micro_batch, const BatchOptions& options,
                           MicroBatchRun* run, Trainer* trainer);
  absl::Status EndBatch();
  absl::Status CheckSameProgram() const;
  absl::StatusOr<std::vector<at::Tensor>> RunActions(
      const MicroBatchLoss& loss, const BatchOptions& options,
      Trainer* trainer);
  absl::StatusOr<at::Tensor> RunEvaluation(
      const std::function<absl::StatusOr<at::Tensor>()>& forward);
  absl::Status CheckUsable() const;
  absl::Status FailTogether(const absl::Status& mine);

  const ShardedModel* const model_;
  const std::vector<PipelineAction> actions_;
  const int micro_batches_;
  std::vector<at::Tensor> elsewhere_;  // parameters of other stages
  StagedRun run_;
  uint64_t generator_ = 0;  // its state before the batch, as a number
  absl::Status failed_;     // what was sent then may wait still
};

}  // namespace tessera
#endif  // ENGINE_TRAIN_PIPELINE_BATCHES_H_
