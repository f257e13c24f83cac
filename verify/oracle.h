// Oracle: what W ranks must compute, worked out in one process with plain
// libtorch. It includes nothing of sharding, optim or engine, so that it cannot
// share their mistakes. Slow and obvious.
//
//   start         masters are the module's parameters, in float32 where those
//                 are 16-bit; parameters are rounded to `dtype`, and with
//                 narrow_masters masters, too
//   micro-batch   for each rank in turn, with that rank's own module (buffers)
//                 and RNG: loss.backward(scale / accumulation)
//   reduction     send = gradient, in the reduce dtype, / predivide
//                 mean = (send0 + send1 + ... in rank order), in the reduce
//                 dtype (16-bit ones in float32 and rounded once); in the
//                 master's dtype / (W / predivide). Means are added up over the
//                 micro-batches, the first one copied; or each rank's own
//                 gradients are, in the master's dtype, and reduced once a step
//   step          nothing where an element is not finite, if so asked; else
//                 elements within max_value, and then gradient * (1 / scale /
//                 total weight * clipping), a step of whole masters with the
//                 options of their group (verify/oracle_step.h,
//                 oracle_groups.h), parameters rounded. Where a group is
//                 clipped by its own norm: (gradient * clipping) * (1 / ...)
//
// With weights: loss.backward(scale * weight), and the sum over ranks is not
// divided; where means are asked for total weight is their sum, else that / W.
// Where something is float16, or W is 1, weights are first divided by a unit:
// that of the step's first micro-batch (with any) if all ranks have the same
// one and `accumulation` is 1, and then sums are divided by W; else the least
// power of two that the largest of them times `accumulation`, each rounded up
// to a power of two, is, and then they are divided by W, rounded up so.
//
// Complex parameters are pairs of reals, in sums, norm and optimizer.
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
#ifndef VERIFY_ORACLE_H_
#define VERIFY_ORACLE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/strings/string_view.h"
#include "verify/oracle_groups.h"
#include "verify/oracle_scale.h"
#include "verify/oracle_step.h"

namespace torch::nn {
class Module;
}

namespace tessera {

struct OracleOptions {
  int world_size = 1;
  // Where the modules are. The default generator below is this device's.
  at::Device device = at::kCPU;
  // Ranks that follow each other shard, the groups are replicas: sums are
  // (send0 + send1) + (send2 + send3), each + of one kind as above. 0: all
  // ranks are one group.
  int shard_group_size = 0;
  int accumulation = 1;
  // Seeds the default generator before each rank's module is built.
  uint64_t model_seed = 0;
  // Seeds the default generator of rank r with rank_seed + r thereafter.
  uint64_t rank_seed = 0;

  // Of parameters that are in no group.
  OracleStepOptions optimizer;
  std::vector<OracleGroup> groups;
  // All rates above are multiplied with.
  double rate_factor = 1;

  // Of real floating parameters, except those of norm layers if these are
  // kept. Unset: what the module has.
  std::optional<at::ScalarType> dtype;
  bool keep_norms = false;
  // Operators cast their inputs to that (verify/plain/plain_casts.h).
  bool cast_inputs = false;
  // Of real floating buffers. Unset: what the module has.
  std::optional<at::ScalarType> buffer_dtype;
  // Where the parameter's dtype is float32 or 16-bit. Unset, or elsewhere: the
  // parameter's.
  std::optional<at::ScalarType> reduce_dtype;
  // Masters are values of the parameters' dtype where that has 16 bits.
  bool narrow_masters = false;
  // What the sums over micro-batches are rounded to, after each, beside masters
  // of float32. Unset: they are not.
  std::optional<at::ScalarType> gradient_dtype;

  // Reduces once a step, not each micro-batch.
  bool accumulate_locally = false;
  // Gradients are sums over ranks, not means.
  bool sum = false;
  double predivide = 1;
  // A rank's number of samples in a micro-batch. Where it is 0 gradients are
  // zeros.
  std::function<double(int rank, int64_t micro_batch)> weight;
  // Losses are computed in float16 in parts, whatever the dtypes above are.
  bool half = false;

  std::optional<LossScaling> loss_scaling;  // skips overflows too
  bool skip_overflows = false;

  double max_norm = 0;  // 0: no clipping
  double norm_p = 2;    // > 0, or infinite
  // Of elements of gradient / divisor, before the norm; 0: none.
  double max_value = 0;
  // Of the norm of gradient / divisor of each row, by that of the weights,
  // after max_value; 0: none. Weights' norms count as `adaptive_eps` at least.
  double adaptive = 0;
  double adaptive_eps = 1e-3;

  bool roundings = false;  // for rounding()
};

class Oracle {
 public:
  using MakeModule = std::function<std::shared_ptr<torch::nn::Module>()>;
  // The loss of a rank's micro-batch; these are numbered from 0. Undefined
  // where the rank has no data; its weight is 0 then.
  using Loss = std::function<at::Tensor(torch::nn::Module& module, int rank,
                                        int64_t micro_batch)>;
  // What became of a step.
  struct Outcome {
    bool skipped = false;
    double scale = 1;  // its losses were multiplied with
    // Of the unscaled gradients, before clipping by it; without those of groups
    // that are clipped by norms of their own.
    double norm = 0;
    // What gradient() is to be divided by: the scale, times all weights.
    double divisor = 1;
  };

  Oracle(const MakeModule& make_module, OracleOptions options);
  ~Oracle();

  // One optimizer step of `accumulation` micro-batches. Returns the losses,
  // [rank][micro-batch of the step].
  std::vector<std::vector<at::Tensor>> TrainStep(const Loss& loss);
  // Of the last step.
  const Outcome& outcome() const { return outcome_; }

  // Names of distinct parameters, tied ones under their first name, in order of
  // registration.
  std::vector<std::string> parameter_names() const;
  at::Tensor parameter(absl::string_view name) const;
  // What the optimizer works on.
  at::Tensor master(absl::string_view name) const;
  // The last step's averaged gradient, scaled and not clipped, in the master's
  // dtype; undefined if no rank had one.
  at::Tensor gradient(absl::string_view name) const;
  // What one rounding of an element of gradient() may be: the absolute values
  // of all that was added, times the epsilon of the dtype in which it was.
  at::Tensor rounding(absl::string_view name) const;

  // Of the steps from now on, of a group; "default" is of parameters that are
  // in none.
  void SetLearningRate(absl::string_view group, double rate);
  // Another master, and on all ranks the parameters that it gives.
  void SetMaster(absl::string_view name, const at::Tensor& value);

  // The module of a rank: its buffers are that rank's.
  torch::nn::Module& module(int rank) const;
  // What the default generator's state is on that rank.
  at::Tensor generator_state(int rank) const;

 private:
  struct Rank;
  struct Parameter;
  void Freeze(const torch::nn::Module& module) const;
  void AddParameters(const torch::nn::Module& module);
  const OracleStepOptions& StepOptionsOf(const Parameter& p) const;
  bool HasNarrowMaster(const Parameter& p) const;
  bool AnyHalf() const;
  void ChooseUnit();
  at::Tensor RunRank(const Loss& loss, int r, double scale);
  std::vector<at::Tensor> Replicas(int r) const;
  void TakeGradients(int r, double weight);
  at::ScalarType GradientDtypeOf(const Parameter& p) const;
  at::ScalarType ReduceDtypeOf(const Parameter& p) const;
  // Rounded to what the step's gradient is kept in.
  at::Tensor Kept(const Parameter& p, const at::Tensor& gradient) const;
  void Reduce(Parameter* p) const;
  void AddRounding(Parameter* p, const std::vector<at::Tensor>& sends) const;
  void ClipValues();
  void ClipRows();
  // Of the gradients of parameters in that group; none: of all that have no
  // maximum of their own.
  double Norm(std::optional<size_t> group) const;
  bool HasOwnNorm(const Parameter& p) const;
  double ClipNorms(double inverse);
  bool GradientsAreFinite() const;
  void StepOptimizer(double factor);
  const Parameter& Find(absl::string_view name) const;

  const OracleOptions options_;
  OracleStepOptions step_options_;
  std::vector<OracleGroup> groups_;
  std::vector<Rank> ranks_;
  std::vector<Parameter> parameters_;
  OracleAverages averages_;
  OracleScale scale_;
  int64_t micro_batches_ = 0;  // done by each rank
  double unit_ = 1;            // of the step's weights
  double sum_divisor_ = 1;     // of its sums over ranks, unless asked for
  double total_weight_ = 0;    // of the step, in units
  Outcome outcome_;
};

}  // namespace tessera
#endif  // VERIFY_ORACLE_H_
