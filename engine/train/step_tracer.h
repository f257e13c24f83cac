// StepTracer: records what the configuration's `trace` section asks for, and
// writes it: RUN/trace.rankR.json, and with kineto RUN/kineto.rankR.json.
//
// What the recording before left in RUN is kept as NAME.previous.
// Files are made when the last step that is recorded has ended, on a thread of
// their own; what ends before leaves what it has. Errors are one warning: a
// trace is no reason to stop a run.
//
// Threads: those of Trainer's calls, one at a time.
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

  // Create has ended.
  void Begin();
  // A backward is about to begin: what came before was its forward, and what
  // else the program did.
  void EndForward();
  void EndBackward();
  // An optimizer step has ended: its number, which a skipped one has in common
  // with the one that is made in its place, and Engine::updates().
  void EndStep(int64_t step, int64_t update);
  // The engine trains no more: writes what there is, and waits for the files.
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
