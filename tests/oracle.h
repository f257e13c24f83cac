// Oracle: what W ranks must compute, worked out in one process with plain
// libtorch. It includes nothing of sharding, optim or engine, so that it cannot
// share their mistakes.
//
//   micro-batch   for each rank in turn, with that rank's own module (buffers)
//                 and RNG: loss.backward(1 / accumulation)
//                 per parameter: (g0 + g1 + ... in rank order) / W
//   step          micro-batches added up, the first one copied;
//                 one at::_fused_adamw_ over whole parameters
//
// A rank without a gradient counts as zeros if another rank has one. Where no
// rank has one in the whole step, the parameter is skipped: no decay, and its
// step count stays.
//
// libtorch sums in one thread from the first oracle on: how a sum is cut into
// threads is not what is compared, and ranks must do the same.
//
// Threads: calls come from one thread. The default generator's state is that of
// before after every call.
#ifndef TESTS_ORACLE_H_
#define TESTS_ORACLE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/strings/string_view.h"

namespace torch::nn {
class Module;
}

namespace tessera {

struct OracleOptions {
  int world_size = 1;
  int accumulation = 1;
  // Seeds the default generator before each rank's module is built.
  uint64_t model_seed = 0;
  // Seeds the default generator of rank r with rank_seed + r thereafter.
  uint64_t rank_seed = 0;
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
};

class Oracle {
 public:
  using MakeModule = std::function<std::shared_ptr<torch::nn::Module>()>;
  // The loss of a rank's micro-batch; these are numbered from 0.
  using Loss = std::function<at::Tensor(torch::nn::Module& module, int rank,
                                        int64_t micro_batch)>;

  Oracle(const MakeModule& make_module, OracleOptions options);
  ~Oracle();

  // One optimizer step of `accumulation` micro-batches. Returns the losses,
  // [rank][micro-batch of the step].
  std::vector<std::vector<at::Tensor>> TrainStep(const Loss& loss);

  // Names of distinct parameters, tied ones under their first name, in order of
  // registration.
  std::vector<std::string> parameter_names() const;
  at::Tensor parameter(absl::string_view name) const;
  // The last step's averaged gradient; undefined if no rank had one.
  at::Tensor gradient(absl::string_view name) const;
  // The module of a rank: its buffers are that rank's.
  torch::nn::Module& module(int rank) const;
  // What the default generator's state is on that rank.
  at::Tensor generator_state(int rank) const;

 private:
  struct Rank;
  struct Parameter;
  void AddMicroBatch(const Loss& loss, std::vector<std::vector<at::Tensor>>*);
  void StepOptimizer();
  const Parameter& Find(absl::string_view name) const;

  OracleOptions options_;
  std::vector<Rank> ranks_;
  std::vector<Parameter> parameters_;
  int64_t micro_batches_ = 0;  // done by each rank
};

}  // namespace tessera
#endif  // TESTS_ORACLE_H_
