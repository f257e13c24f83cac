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
// by all ranks, in the same order.
#ifndef ENGINE_ENGINE_H_
#define ENGINE_ENGINE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "comm/communicator.h"
#include "config/config.pb.h"

namespace torch::nn {
class Module;
template <typename Contained>
class ModuleHolder;
}  // namespace torch::nn

namespace tessera {

struct EngineOptions {
  // The group over which to shard; the world's (comm/world.h) if null.
  std::shared_ptr<Communicator> communicator;
  // Rank 0's parameters and buffers replace the others' at Create. Otherwise
  // parameters must be equal on all ranks (checked; InvalidArgument names the
  // first that differs).
  bool sync_from_rank0 = false;
  // Units with more elements are cut between parameters.
  int64_t max_unit_numel = 50'000'000;
  // Units kept whole at stage 3 besides those in use, the last touched ones.
  // 0 frees each unit as soon as no operator uses it (slow; shows stale reads).
  int live_units = 2;
};

// Bytes of model states; between uses, on this rank.
struct StateBytes {
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t optimizer = 0;
  int64_t total() const { return parameters + gradients + optimizer; }
};

class Engine {
 public:
  // Takes the module's parameters over: lays them out in units, shards what the
  // stage says, installs the hooks. `config` is a path (JSON, or text protobuf)
  // or a proto. The engine shares ownership of the module. COLLECTIVE.
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

  // Local: leaves freed parameters as they are (an access names the parameter).
  // Close() first to get a whole, plain module back.
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
  // if a rank called Step or ZeroGrad that another did not. COLLECTIVE.
  absl::Status Backward(const at::Tensor& loss);

  // At an accumulation boundary: steps the optimizer and zeroes the gradients.
  // Elsewhere: counts and does nothing. FailedPrecondition without a Backward
  // of this engine since the last Step, and with gradients that did not come
  // through Backward. COLLECTIVE.
  absl::Status Step();

  // Drops all gradients, whoever made them, and the micro-batches counted since
  // the last optimizer step. LOCAL, but make it on all ranks alike.
  absl::Status ZeroGrad();

  // The step's averaged gradient of a parameter so far, whole, in the
  // parameter's shape; undefined if it got none. COLLECTIVE.
  absl::StatusOr<at::Tensor> Gradient(absl::string_view name);
  // A whole copy of a parameter. COLLECTIVE.
  absl::StatusOr<at::Tensor> Parameter(absl::string_view name);

  // Writes parameters, optimizer states, step counts and this rank's RNG state
  // into folder `dir` (made, or replaced whole); `client_state` is this rank's
  // own bytes, given back by LoadCheckpoint. Appears under its name only when
  // complete. COLLECTIVE.
  absl::Status SaveCheckpoint(const std::string& dir,
                              absl::string_view client_state = "");
  // Same model, stage and world size as it was saved with. Returns the rank's
  // client_state. COLLECTIVE. Errors: NotFound, DataLoss, FailedPrecondition
  // naming what differs.
  absl::StatusOr<std::string> LoadCheckpoint(const std::string& dir);

  // Makes every parameter whole and plain again and takes all hooks away. The
  // module is then as if the engine had never been. COLLECTIVE.
  absl::Status Close();

  // Model states held by this rank between uses, and what one replica of all
  // (DDP) would hold.
  StateBytes state_bytes() const;
  StateBytes replicated_state_bytes() const;
  int stage() const;
  int64_t step() const;  // optimizer steps done
  // One line per unit: name, parameters, elements; for logs.
  std::vector<std::string> DescribeUnits() const;

 private:
  class Impl;
  explicit Engine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
#endif  // ENGINE_ENGINE_H_
