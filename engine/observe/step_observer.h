// StepObserver: observes the steps of an engine and reports them: metrics to
// the writers, lines to the log, floating-point operations, collectives' costs.
// An engine has one if its configuration asks for any of that; a Trainer calls
// it. Training does not depend on it: losses and states have the same bits with
// and without it.
//
//   Backward n  EndForward .. EndAutograd .. EndBackward
//   Step n      BeginStep [Complete n-1] ... EndStep   queues the exchange of n
//   Step n+1    BeginStep [Complete n]                 waits for it; written
//
// What the device decides in a step (its norm, whether it was skipped) is known
// when Complete is called; rank_exchange.h explains the rest.
#ifndef ENGINE_OBSERVE_STEP_OBSERVER_H_
#define ENGINE_OBSERVE_STEP_OBSERVER_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/api/engine_types.h"
#include "engine/api/run_place.h"
#include "engine/model/sharded_model.h"
#include "engine/observe/flops_profile.h"
#include "engine/observe/metrics_outputs.h"
#include "engine/observe/monitor.h"
#include "engine/observe/parameter_histograms.h"
#include "engine/observe/print_lines.h"
#include "engine/observe/rank_exchange.h"
#include "engine/observe/run_starts.h"
#include "engine/observe/step_clock.h"

namespace tessera {

namespace proto {
class Config;
}

struct StepObserverOptions {
  const PlanReport* plan = nullptr;  // for run.json; null: none
  // EngineOptions::metrics_writers of this rank.
  std::vector<std::shared_ptr<MetricsWriter>> writers;
};

class StepObserver {
 public:
  // Null if neither the configuration nor rank 0's program asks for anything.
  // Opens the writers, on rank 0, and writes run.json; in any case `monitor`
  // learns the model's and the device's figures. `model`, `config` and
  // `monitor` outlive it. COLLECTIVE. Errors of any are returned on all ranks.
  static absl::StatusOr<std::unique_ptr<StepObserver>> Create(
      const ShardedModel* model, const proto::Config* config, Monitor* monitor,
      const StepObserverOptions& options);

  // ---- Called by Trainer. LOCAL, except for AddHistograms, and that EndStep
  // queues an all-gather.
  void EndForward();
  void EndAutograd() { clock_.EndAutograd(); }
  // Adds the loss of a Backward that did not fail. `weight`:
  // BackwardOptions::weight. `another`: its samples were counted with the
  // previous loss.
  void AddLoss(const at::Tensor& loss, std::optional<double> weight,
               bool another);
  void EndBackward() { clock_.EndBackward(); }
  void BeginStep() { clock_.BeginStep(); }
  void EndMicroBatch() { clock_.EndMicroBatch(); }
  // Makes the histograms of optimizer step `step`, where the configuration asks
  // for them, before the step has changed anything. See
  // ParameterHistograms::Make; its errors are the step's. COLLECTIVE.
  absl::Status AddHistograms(int64_t step, const Gradients& gradients,
                             double divisor);
  // Forgets the step so far: its gradients were dropped.
  void DropStep();
  // Whether Complete waits for the outcome of the last step.
  bool awaits_outcome() const { return !pending_.empty(); }
  // Gives the outcome of the last optimizer step, if there was one, after which
  // the run is at `place`.
  void Complete(const StepReport& report, const RunPlace& place);
  // Ends an optimizer step, made or skipped: there were `updates` so far, with
  // `samples` of all ranks; `step_at_most`: as Engine's. `memory` is this
  // step's.
  void EndStep(int64_t updates, int64_t step_at_most, int64_t samples,
               const StepMemoryReport& memory);

  // Reports the last steps. REQUIRES: Complete. COLLECTIVE.
  void Close();
  // As Close, for an engine that ends without it: reports this rank's metrics
  // where the other ranks' have not arrived. `failed`: it ends because of an
  // error. LOCAL.
  void Abandon(bool failed) { End(failed ? "failed" : "ended"); }

 private:
  // A step that is not reported yet.
  struct Pending {
    int64_t updates = 0;
    StepRecord record;
    RankExchange exchange;
    StepMetrics added;                   // by the program
    PrintInterval since;                 // the last reported step
    std::optional<PrintInterval> print;  // a line is due
    bool completed = false;
  };

  StepObserver(const ShardedModel* model, const proto::Config* config,
               Monitor* monitor, bool writes);
  absl::Status Open(const StepObserverOptions& options);
  bool Prints(int64_t step) const;
  void BeginProfile(int64_t updates);
  RankMetrics RankMetricsOf(const StepTimes& times,
                            const StepMemoryReport& memory) const;
  double TakeTokens();
  void AddSpeed(const PrintInterval& since, StepRecord* record) const;
  void Finish(Pending* pending);
  void Print(const StepRecord& record, const PrintInterval& interval);
  void End(absl::string_view how);
  void WriteEnd(absl::string_view how);

  const ShardedModel* const model_;
  const proto::Config& config_;
  Monitor* const monitor_;
  const int rank_;
  const bool writes_;         // some writer is enabled, on rank 0
  const int64_t print_each_;  // 0: never
  const bool breakdown_;
  std::optional<MetricsOutputs> outputs_;  // rank 0's
  StepClock clock_;
  LossSum losses_;
  double loss_weight_ = 0;  // of BackwardOptions
  int64_t updates_ = 0;
  RunPlace place_;          // at the last Complete
  PrintInterval since_;     // the last reported step, tokens of this rank
  PrintInterval interval_;  // since the last line
  double print_tokens_ = 0;
  // Nanoseconds at the last reported step.
  int64_t data_wait_before_ = 0, exposed_before_ = 0;
  std::optional<FlopsProfile> profile_;
  std::optional<ParameterHistograms> histograms_;
  std::deque<Pending> pending_;    // two at most
  std::optional<RunStart> start_;  // in run.json
  bool ended_ = false;
};

}  // namespace tessera
#endif  // ENGINE_OBSERVE_STEP_OBSERVER_H_
