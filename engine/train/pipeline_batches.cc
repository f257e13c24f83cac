#include "engine/train/pipeline_batches.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/core/grad_mode.h"
#include "absl/strings/str_cat.h"
#include "base/above/below_autograd.h"
#include "base/crc32c.h"
#include "base/monotonic.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "base/trace/trace.h"
#include "comm/all_gather_values.h"
#include "engine/train/trainer.h"
#include "parallel/pipeline/served_links.h"

namespace tessera {
namespace {

// In place of the number of a micro-batch: no two may be under way with one
// key.
constexpr int kEvaluation = 1 << 20;
constexpr int kEndOfBatch = kEvaluation + 1;

// Shorter than the announcements' grace, after which others leave.
constexpr absl::Duration kAllFailedWait = absl::Seconds(4);

uint64_t PrintOfWeight(double weight) {
  uint64_t bits = 0;
  std::memcpy(&bits, &weight, sizeof bits);
  return bits;
}

uint64_t GeneratorPrint() {
  const at::Tensor state = at::detail::getDefaultCPUGenerator().get_state();
  return Crc32c(absl::string_view(
      static_cast<const char*>(state.const_data_ptr()), state.nbytes()));
}

}  // namespace

absl::StatusOr<std::unique_ptr<PipelineBatches>> PipelineBatches::Create(
    const ShardedModel* model, PipelineSchedule schedule, int micro_batches,
    const std::vector<StagedParameter>& parameters) {
  Communicator& pipeline = *model->pipeline();
  auto server = pipeline.ServeShards({"links of a pipeline"});
  TESSERA_RETURN_IF_ERROR(
      model->comm()->AgreeOk(server.status(), "Engine::Create"));
  return std::unique_ptr<PipelineBatches>(new PipelineBatches(
      model, /*one_way=*/schedule != PipelineSchedule::kGPipe,
      ScheduleOf(schedule, pipeline.rank(), pipeline.world_size(),
                 micro_batches),
      micro_batches, parameters,
      std::make_shared<ServedLinks>(*std::move(server))));
}

PipelineBatches::PipelineBatches(const ShardedModel* model, bool one_way,
                                 std::vector<PipelineAction> actions,
                                 int micro_batches,
                                 const std::vector<StagedParameter>& parameters,
                                 std::shared_ptr<StageLinks> links)
    : model_(model),
      actions_(std::move(actions)),
      micro_batches_(micro_batches),
      run_(model->pipeline()->rank(), model->pipeline()->world_size(), one_way,
           std::any_of(model->flats().begin(), model->flats().end(),
                       [](const auto& flat) { return flat->cast_inputs(); }),
           parameters, std::move(links)) {
  for (const StagedParameter& p : parameters) {
    if (p.home != run_.stage()) elsewhere_.push_back(p.tensor);
  }
}

// All ranks get the loss first: who looks at it need not know of stages.
absl::Status PipelineBatches::RunBackward(int micro_batch,
                                          const BatchOptions& options,
                                          MicroBatchRun* run,
                                          Trainer* trainer) {
  BackwardOptions how;
  if (!options.weights.empty()) {
    how.weight = options.weights[static_cast<size_t>(micro_batch)];
  }
  {
    const StagedRun::Scope scope(
        &run_, micro_batch, /*backward=*/true,
        absl::StrCat("the backward of micro-batch ", micro_batch));
    TESSERA_RETURN_IF_ERROR(CatchTorch(
        "loss", [&] { run->loss = run_.BringEverywhere(run->loss); }));
    if (how.weight.has_value()) run_.AddToPrint(PrintOfWeight(*how.weight));
    if (run->autocast) trainer->NoteAutocast();
    const uint64_t before = GeneratorPrint();
    TESSERA_RETURN_IF_ERROR(trainer->Backward(run->loss, how));
    if (GeneratorPrint() != before) {
      return absl::FailedPreconditionError(
          "a backward of a pipeline has drawn random numbers (a hook, or a "
          "function of the program): forwards of other micro-batches would "
          "draw "
          "others than without a pipeline; draw them in forward");
    }
    run->loss = run->loss.detach();
  }
  for (const at::Tensor& p : elsewhere_) p.mutable_grad().reset();
  run_.EndMicroBatch();
  return micro_batch + 1 < micro_batches_ ? trainer->Step() : absl::OkStatus();
}

absl::Status PipelineBatches::EndBatch() {
  {
    const StagedRun::Scope scope(&run_, kEndOfBatch, /*backward=*/false,
                                 "the end of a batch");
    TESSERA_RETURN_IF_ERROR(
        CatchTorch("end of a batch", [&] { run_.EndBatch(); }));
  }
  return CheckSameProgram();
}

// Ranks that read other samples, or draw other random numbers, would train
// something else in silence.
absl::Status PipelineBatches::CheckSameProgram() const {
  const uint64_t now = GeneratorPrint();
  const uint64_t drawn = now == generator_ ? 0 : now;  // 0: nothing
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<std::vector<uint64_t>> all,
      AllGatherValues(model_->pipeline().get(),
                      std::vector<uint64_t>{run_.print(), drawn},
                      CommTag{"program of each stage"}));
  for (size_t stage = 1; stage < all.size(); ++stage) {
    const bool draws = all[stage][1] != all[0][1];
    if (!draws && all[stage][0] == all[0][0]) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "the ranks of stages 0 and ", stage, " of a pipeline have ",
        draws ? "drawn other random numbers"
              : "run other operators, or the same on other inputs, in the "
                "forwards of a batch",
        ": they must run one program with the same samples "
        "(Engine::data_rank says whose) and the same seeds "
        "(tessera::SeedAll)"));
  }
  return absl::OkStatus();
}

absl::Status PipelineBatches::RunForward(int micro_batch,
                                         const MicroBatchLoss& loss,
                                         MicroBatchRun* run, Trainer* trainer) {
  const TraceScope trace(TraceTrack::kMain, "forward");
  const StagedRun::Scope scope(
      &run_, micro_batch, /*backward=*/false,
      absl::StrCat("the forward of micro-batch ", micro_batch));
  TESSERA_ASSIGN_OR_RETURN(
      run->loss, CatchTorch("forward", [&] { return loss(micro_batch); }));
  if (!run->loss.defined()) {
    return absl::InvalidArgumentError("BackwardBatch: the loss is undefined");
  }
  run->autocast = trainer->TakeAutocast();
  trainer->EndForward();
  return absl::OkStatus();
}

// Other stages wait for what this one would have sent, and are served what it
// has: many find the same error themselves.
absl::Status PipelineBatches::FailTogether(const absl::Status& mine) {
  Communicator* const job = model_->comm();
  failed_ = mine;
  job->Announce(mine);
  if (!job->AllAnnounced(kAllFailedWait)) return mine;
  // All are here, each with its own error, or with another's by its name.
  (void)job->AgreeOk(mine, "BackwardBatch");
  job->ClearAnnouncement();
  return mine;
}

absl::StatusOr<std::vector<at::Tensor>> PipelineBatches::Backward(
    const MicroBatchLoss& loss, const BatchOptions& options, Trainer* trainer) {
  TESSERA_RETURN_IF_ERROR(CheckUsable());
  auto losses = RunActions(loss, options, trainer);
  if (!losses.ok()) return FailTogether(losses.status());
  return losses;
}

absl::StatusOr<std::vector<at::Tensor>> PipelineBatches::RunActions(
    const MicroBatchLoss& loss, const BatchOptions& options, Trainer* trainer) {
  generator_ = GeneratorPrint();
  PipelineReport report;
  report.stage = run_.stage();
  report.stages = model_->pipeline()->world_size();
  report.micro_batches = micro_batches_;
  report.bubble = BubbleOf(report.stages, micro_batches_);
  const int64_t sent = run_.sent_bytes();
  const absl::Duration waited = run_.waited();
  std::vector<MicroBatchRun> runs(static_cast<size_t>(micro_batches_));
  for (const PipelineAction& action : actions_) {
    MicroBatchRun* const one = &runs[static_cast<size_t>(action.micro_batch)];
    const absl::Duration began = MonotonicNow(), before = run_.waited();
    const bool forward = action.kind == PipelineAction::Kind::kForward;
    TESSERA_RETURN_IF_ERROR(
        forward ? RunForward(action.micro_batch, loss, one, trainer)
                : RunBackward(action.micro_batch, options, one, trainer));
    (forward ? report.forward : report.backward) +=
        MonotonicNow() - began - (run_.waited() - before);
  }
  report.waited = run_.waited() - waited;
  report.sent_bytes = run_.sent_bytes() - sent;
  report.idle_share = absl::FDivDuration(
      report.waited, report.forward + report.backward + report.waited);
  trainer->SetPipelineReport(report);
  TESSERA_RETURN_IF_ERROR(EndBatch());
  std::vector<at::Tensor> losses;
  for (const MicroBatchRun& run : runs) losses.push_back(run.loss);
  return losses;
}

absl::Status PipelineBatches::CheckUsable() const {
  if (BelowAutograd::Current() != nullptr) {
    return absl::FailedPreconditionError(
        "a batch or an evaluation of a pipeline within the forward of another: "
        "run it before, and give the forward its result");
  }
  if (failed_.ok()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "a batch of the pipeline has failed before, and what stages have sent "
      "each other is lost; start the ranks again from a checkpoint: ",
      failed_.message()));
}

absl::StatusOr<at::Tensor> PipelineBatches::Evaluate(
    const std::function<absl::StatusOr<at::Tensor>()>& forward) {
  TESSERA_RETURN_IF_ERROR(CheckUsable());
  auto result = RunEvaluation(forward);
  if (!result.ok()) return FailTogether(result.status());
  return result;
}

absl::StatusOr<at::Tensor> PipelineBatches::RunEvaluation(
    const std::function<absl::StatusOr<at::Tensor>()>& forward) {
  generator_ = GeneratorPrint();
  const at::NoGradGuard no_grad;
  at::Tensor result;
  {
    const StagedRun::Scope scope(&run_, kEvaluation, /*backward=*/false,
                                 "an evaluation");
    TESSERA_ASSIGN_OR_RETURN(
        result, CatchTorch("evaluation", [&] { return forward(); }));
    if (!result.defined()) {
      return absl::InvalidArgumentError(
          "EvalBatch: the forward gave no tensor");
    }
    TESSERA_RETURN_IF_ERROR(CatchTorch(
        "evaluation", [&] { result = run_.BringEverywhere(result); }));
  }
  TESSERA_RETURN_IF_ERROR(EndBatch());
  return result;
}

}  // namespace tessera
