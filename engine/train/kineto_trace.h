// KinetoTrace: runs libtorch's own profiler (Kineto) for some steps of a
// program without Python: it records every operator, and on CUDA every kernel.
//
// Source: torch/csrc/autograd/profiler_kineto.h, which torch.profiler uses.
//
// Threads: Start and Stop are called on one thread, the program's; libtorch
// hands the profiler to its own threads (a device's backward).
#ifndef ENGINE_TRAIN_KINETO_TRACE_H_
#define ENGINE_TRAIN_KINETO_TRACE_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "c10/core/Device.h"

namespace torch::autograd::profiler {
struct ProfilerResult;
}  // namespace torch::autograd::profiler

namespace tessera {

class KinetoTrace {
 public:
  using Result = std::shared_ptr<torch::autograd::profiler::ProfilerResult>;

  // Starts the profiler. FailedPrecondition where the program profiles itself;
  // libtorch's error where it was built without Kineto. LOCAL.
  absl::Status Start(c10::Device device);
  // Stops the profiler and returns its result; null if it was not started. An
  // error if it was started on another thread. LOCAL.
  absl::StatusOr<Result> Stop();
  // Writes a result to a file, atomically. Any thread. LOCAL.
  static absl::Status Save(torch::autograd::profiler::ProfilerResult& result,
                           const std::string& path);

 private:
  bool runs_ = false;
};

}  // namespace tessera
#endif  // ENGINE_TRAIN_KINETO_TRACE_H_
