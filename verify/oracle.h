// Oracle computes in one process, with plain libtorch, what W ranks must
// compute. It includes nothing of sharding, optim or engine, so that it cannot
// share their mistakes. It is slow and obvious. Layers that are divided over
// ranks are computed by parallel/tensor, as the engine's are.
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
// With weights, the loss is loss.backward(scale * weight), and the sum over
// ranks is not divided; where means are requested, total weight is their sum,
// otherwise that / W. Where something is float16, or W is 1, weights are first
// divided by a unit. If `accumulation` is 1 and all ranks have the same weight,
// the unit is the weight of the step's first micro-batch (with any), and sums
// are divided by W. Otherwise the unit is the largest weight times
// `accumulation`, each rounded up to a power of two, and sums are divided by W,
// rounded up to a power of two.
//
// Complex parameters count as pairs of reals, in sums, norm and optimizer.
//
// A rank without a gradient counts as zeros if another rank has one. If no rank
// has one in the whole step, the parameter is skipped: it has no decay, and its
// step count stays.
//
// From the first oracle on libtorch sums in one thread. How a sum is cut into
// threads is not what is compared, and ranks must do the same.
//
// Threads: calls come from one thread. Every call leaves the default
// generator's state as it was.
#ifndef VERIFY_ORACLE_H_
#define VERIFY_ORACLE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
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

class PartTurns;  // verify/parts/part_turns.h

struct OracleOptions {
  int world_size = 1;  // ranks that have samples of their own
  // Each of them is so many, which have the parts of the parameters that
  // `tensor_cuts` names, and are computed in turn (verify/parts/part_turns.h).
  // Other parameters are whole on each, and their gradients must be equal
  // there.
  int tensor_ranks = 1;
  struct Cut {
    std::string name;
    int64_t dim = 0, groups = 1;  // as TensorPlacement's
  };
  std::vector<Cut> tensor_cuts;
  // Or each is so many that have parts of the same sequences (DivideSequence),
  // computed in turn, too: of their gradients, addends, a sum has one after the
  // other in the place of their rank.
  int sequence_ranks = 1;
  // The device of the modules, and of the default generator below.
  at::Device device = at::kCPU;
  // Consecutive ranks form shard groups of this size; the groups are replicas.
  // Sums are (send0 + send1) + (send2 + send3), each + computed as above. 0:
  // all ranks are one group.
  int shard_group_size = 0;
  int accumulation = 1;
  // Seeds the default generator before each rank's module is built.
  uint64_t model_seed = 0;
  // Seeds the default generator of rank r with rank_seed + r thereafter.
  uint64_t rank_seed = 0;

  // Options of parameters that are in no group.
  OracleStepOptions optimizer;
  std::vector<OracleGroup> groups;
  // All rates above are multiplied by this.
  double rate_factor = 1;

  // The dtype of real floating parameters, except for those of norm layers with
  // keep_norms. Unset: the module's.
  std::optional<at::ScalarType> dtype;
  bool keep_norms = false;
  // Operators cast their inputs to the parameters' dtype
  // (verify/plain/plain_casts.h).
  bool cast_inputs = false;
  // The dtype of real floating buffers. Unset: the module's.
  std::optional<at::ScalarType> buffer_dtype;
  // The dtype of reductions for parameters that are float32 or 16-bit. Unset,
  // or for others: the parameter's.
  std::optional<at::ScalarType> reduce_dtype;
  // Masters are values of the parameters' dtype if that has 16 bits.
  bool narrow_masters = false;
  // Parameters of bfloat16 are masters of float32 with ties rounded away from
  // zero, and NaN as 0x7fc0.
  bool ties_away = false;
  // The dtype to which sums over micro-batches are rounded after each, beside
  // masters of float32. Unset: they are not rounded.
  std::optional<at::ScalarType> gradient_dtype;

  // Reduces once a step, not in each micro-batch.
  bool accumulate_locally = false;
  // Gradients are sums over ranks, not means.
  bool sum = false;
  double predivide = 1;
  // The number of samples of a rank's micro-batch. Where it is 0 gradients are
  // zeros.
  std::function<double(int rank, int64_t micro_batch)> weight;
  // Whether losses are computed in float16 in parts, whatever the dtypes above
  // are.
  bool half = false;

  std::optional<LossScaling> loss_scaling;  // skips overflows too
  bool skip_overflows = false;

  double max_norm = 0;  // 0: no clipping
  double norm_p = 2;    // > 0, or infinite
  // The limit of elements of gradient / divisor, applied before the norm; 0:
  // none.
  double max_value = 0;
  // The limit of the norm of each row of gradient / divisor, as a multiple of
  // the norm of that row of the weights, applied after max_value; 0: none. A
  // norm of weights counts as at least `adaptive_eps`.
  double adaptive = 0;
  double adaptive_eps = 1e-3;

  bool roundings = false;  // for rounding()
};

class Oracle {
 public:
  using MakeModule = std::function<std::shared_ptr<torch::nn::Module>()>;
  // Returns the loss of a rank's micro-batch, numbered from 0. Undefined where
  // the rank has no data; its weight is 0 then.
  using Loss = std::function<at::Tensor(torch::nn::Module& module, int rank,
                                        int64_t micro_batch)>;
  // The result of a step.
  struct Outcome {
    bool skipped = false;
    double scale = 1;  // the factor of its losses
    // The norm of the unscaled gradients, before clipping by it, without those
    // of groups that are clipped by norms of their own.
    double norm = 0;
    // gradient() has to be divided by this: the scale times all weights.
    double divisor = 1;
  };

  Oracle(const MakeModule& make_module, OracleOptions options);
  ~Oracle();

  // Runs one optimizer step of `accumulation` micro-batches. Returns the
  // losses, [rank][micro-batch of the step].
  std::vector<std::vector<at::Tensor>> TrainStep(const Loss& loss);
  // Returns the result of the last step.
  const Outcome& outcome() const { return outcome_; }

  // Returns the names of distinct parameters, tied ones under their first name,
  // in order of registration.
  std::vector<std::string> parameter_names() const;
  at::Tensor parameter(absl::string_view name) const;
  // Returns what the optimizer works on.
  at::Tensor master(absl::string_view name) const;
  // Returns the last step's averaged gradient, scaled and not clipped, in the
  // master's dtype; undefined if no rank had one.
  at::Tensor gradient(absl::string_view name) const;
  // Returns how much one rounding of an element of gradient() may be: the sum
  // of the absolute values of all terms, times the epsilon of the dtype in
  // which they were added.
  at::Tensor rounding(absl::string_view name) const;

  // Sets the rate of a group for the steps from now on; "default" means the
  // parameters that are in no group.
  void SetLearningRate(absl::string_view group, double rate);
  // Replaces a master, and on all ranks the parameters computed from it.
  void SetMaster(absl::string_view name, const at::Tensor& value);

  // Returns the module of a rank, with that rank's buffers; of its first part.
  torch::nn::Module& module(int rank) const;
  // Returns the state of the default generator on that rank.
  at::Tensor generator_state(int rank) const;

 private:
  struct Rank;
  struct Parameter;
  void Freeze(const torch::nn::Module& module) const;
  void AddParameters(const torch::nn::Module& module, int part);
  void AddReplicas(const torch::nn::Module& module, int part);
  // Returns null for a parameter that is whole.
  const OracleOptions::Cut* CutOf(absl::string_view name) const;
  void TakeEqual(Parameter* p, int r) const;
  void TakeGradient(Parameter* p, int sender, double weight) const;
  at::Tensor Joined(
      absl::string_view name,
      const std::function<at::Tensor(const Parameter&)>& of) const;
  const OracleStepOptions& StepOptionsOf(const Parameter& p) const;
  bool HasNarrowMaster(const Parameter& p) const;
  bool RoundsTiesAway(const Parameter& p) const;
  // Sets all ranks' parameter to its master, rounded.
  void Publish(const Parameter& p) const;
  bool AnyHalf() const;
  void ChooseUnit();
  at::Tensor RunRank(const Loss& loss, int r, double scale);
  std::vector<at::Tensor> Replicas(int r, int part) const;
  void TakeGradients(int r, double weight);
  at::ScalarType GradientDtypeOf(const Parameter& p) const;
  at::ScalarType ReduceDtypeOf(const Parameter& p) const;
  // Returns the gradient rounded to the dtype in which the step keeps it.
  at::Tensor Kept(const Parameter& p, const at::Tensor& gradient) const;
  void Reduce(Parameter* p) const;
  void AddRounding(Parameter* p, const std::vector<at::Tensor>& sends) const;
  void ClipValues();
  void ClipRows();
  // Returns the norm of the gradients of parameters in that group; nullopt: of
  // all that have no maximum of their own.
  double Norm(std::optional<size_t> group) const;
  bool HasOwnNorm(const Parameter& p) const;
  double ClipNorms(double inverse);
  bool GradientsAreFinite() const;
  void StepOptimizer(double factor);
  const Parameter& Find(absl::string_view name) const;

  const OracleOptions options_;
  OracleStepOptions step_options_;
  std::vector<OracleGroup> groups_;
  std::unique_ptr<PartTurns> turns_;
  std::vector<Rank> ranks_;
  std::vector<Parameter> parameters_;
  OracleAverages averages_;
  OracleScale scale_;
  int64_t micro_batches_ = 0;  // done by each rank
  double unit_ = 1;            // unit of the step's weights
  double sum_divisor_ = 1;   // divisor of its sums over ranks, unless requested
  double total_weight_ = 0;  // of the step, in units
  Outcome outcome_;
};

}  // namespace tessera
#endif  // VERIFY_ORACLE_H_
