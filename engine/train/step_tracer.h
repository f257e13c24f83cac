// StepTracer: records what the configuration's `trace` section asks for, and
// writes it: RUN/trace.rankR.json, and with kineto RUN/kineto.rankR.json.
//
// Files of an earlier recording in RUN are kept as NAME.previous. Files are
// written on a thread of their own when the last recorded step has ended; a run
// that ends earlier writes what it has. Errors are one warning: a trace is no
// reason to stop a run.
//
// Threads: as for Trainer's calls, one at a time.
#ifndef ENGINE_TRAIN_STEP_TRACER_H_
#define ENGINE_TRAIN_STEP_TRACER_H_

#include <cstdint>
#include <thread>

#include "engine/model/sharded_model.h"
#include "engine/train/kineto_trace.h"

namespace tessera {

namespace proto {
class Config;
}

class StepTracer {
 public:
  // Both outlive this.
  StepTracer(const ShardedModel* model, const proto::Config* config)
      : model_(*model), config_(*config) {}
  ~StepTracer() { End(); }
  StepTracer(const StepTracer&) = delete;
  StepTracer& operator=(const StepTracer&) = delete;

  // Begins recording if the configuration asks for it; called when Create has
  // ended.
  void Begin();
  // Records the time since the last Backward or Step as a forward: a backward
  // is about to begin.
  void EndForward();
  void EndBackward();
  // Ends an optimizer step. `step`: its number, which a skipped step shares
  // with the one made in its place; `update`: Engine::updates().
  void EndStep(int64_t step, int64_t update);
  // Writes what there is and waits for the files: the engine trains no more.
  void End();

 private:
  void Start();
  void Finish();

  const ShardedModel& model_;
  const proto::Config& config_;
  bool records_ = false;
  int64_t steps_ = 0;       // since Create
  int64_t step_begin_ = 0;  // TraceNow()
  int64_t phase_end_ = 0;   // of the backward or step before
  KinetoTrace kineto_;
  std::thread writer_;
};

}  // namespace tessera
#endif  // ENGINE_TRAIN_STEP_TRACER_H_
