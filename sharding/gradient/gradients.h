// Gradients: brings all gradients from autograd to the owners' shards.
//
//   hook on a parameter  its gradient goes to its place in the local flat
//                        gradient [P] of its flat parameter (flat, for short)
//   bucket complete      summed over ranks, in rank order; the owner keeps [S]
//   end of backward      agreement of all ranks; added to the gradients of the
//                        step's earlier micro-batches
//
// A bucket is a flat, or several small consecutive flats.
//
// A hook's call is not "the last gradient": a parameter used in two reentrant
// checkpoints fires twice. So a bucket is complete early only if each expected
// parameter has arrived in the outermost graph task, and no reentrant
// checkpoint can bring more: either the graph has no node of the user's, or the
// flat was not used outside of any graph. Otherwise it is complete at the end
// of backward.
//
// The collectives of one backward are the same on all ranks, whatever their
// graphs were:
//   1. every bucket with expected parameters, in reverse order of registration,
//      each within its shard group and then over the replicas, if there are
//      any;
//   2. the agreement (error, which parameters got a gradient anywhere);
//   3. flats with held gradients: of parameters that were not expected, or that
//      came after their flat was launched.
// The expected parameters are those that got a gradient on any rank in the last
// backward (at first: those that require one), which all ranks know.
//
// Threads: hooks may run on any thread; the other calls come from one.
#ifndef SHARDING_GRADIENT_GRADIENTS_H_
#define SHARDING_GRADIENT_GRADIENTS_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "base/stream/stream_uses.h"
#include "base/torch/grad_access.h"
#include "comm/communicator.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/gradient/flat_gradient.h"
#include "sharding/gradient/reduction.h"

namespace tessera {

struct GradientOptions {
  // false: a reduction is waited for at once, so only one flat's gradients are
  // held besides the shards; true: it is on its way while the next flat's
  // gradients arrive, and waited for when they are complete.
  bool overlap = true;
  // Consecutive flats are reduced together while they have at most so many
  // elements in all.
  int64_t bucket_numel = 1 << 18;
  bool mean = true;          // false: the sum over ranks
  double predivide = 1;      // DeepSpeed's gradient_predivide_factor
  int64_t accumulation = 1;  // micro-batches of a step
  // So many neighbours have the same samples, and addends of their gradients.
  int ranks_of_sample = 1;
  // Gradients may be float16 somewhere, whatever the flats' dtypes are.
  bool half = false;
  // All gradients are used within Run (MicroBatch::uses_up).
  bool uses_up = false;
  // All ranks that wait for each other within a backward, where these are more
  // than the gradients are reduced over: layers are divided. Null: the same.
  std::shared_ptr<Communicator> together;
};

// One call of Backward.
struct MicroBatch {
  // This rank's position in the training; must be identical on all ranks.
  std::string position;
  // This rank's number of samples, in units of Gradients::weight_unit; 0 if it
  // has none (its gradients then count as zero). Weights are added up, and the
  // step's gradient is to be divided by Gradients::weight_divisor. Absent: the
  // mean over ranks.
  std::optional<double> weight;
  // The loss is another one of samples that are counted already.
  bool another_loss = false;
  // The backward may start others within itself
  // (sharding/gradient/nested_graphs.h).
  bool may_nest = true;
  // Gradients stay on this rank, added up in no narrower a dtype than
  // FlatDescription::gradient_dtype, until the next call with reduce. Only
  // ChooseWeightUnit is COLLECTIVE then.
  bool reduce = true;
  // Gradients that the program itself put into .grad() are multiplied by this
  // and added. Absent: they are an error, unless they are zero.
  std::optional<double> outside_factor;
  // Called when the sums of a flat (by number) will be the step's gradient
  // unless a rank fails or a gradient comes late, while other flats are still
  // being reduced. On any thread. An error fails the backward.
  std::function<absl::Status(size_t flat)> reduced;
  // `reduced` may use up gradients (FlatGradient::UseUp). A parameter that
  // gets another gradient after its flat's sums were launched is an error then.
  bool uses_up = false;
};

class Gradients {
 public:
  // Installs a hook on every parameter, frozen ones too (they may be unfrozen);
  // existing hooks are chained. `expected[i]`: parameter i of the model
  // requires a gradient on some rank; identical on all ranks. LOCAL.
  Gradients(const std::vector<std::shared_ptr<FlatParameter>>& flats,
            std::shared_ptr<Communicator> comm, GradientOptions options,
            std::vector<bool> expected);
  ~Gradients();  // takes the hooks away. LOCAL
  Gradients(const Gradients&) = delete;
  Gradients& operator=(const Gradients&) = delete;

  // Runs `backward` and reduces its gradients. Those of other backwards are
  // left in .grad(), as libtorch does. FailedPrecondition if there are such
  // gradients already (MicroBatch::outside_factor), or if ranks differ in
  // MicroBatch::position. An error of any rank is returned on every rank, and
  // the gradients not yet reduced are dropped; those reduced in earlier
  // micro-batches stay. COLLECTIVE.
  absl::Status Run(const std::function<void()>& backward,
                   const MicroBatch& micro_batch);

  // Chooses the unit of the step's weights (gradients_agreement.cc). Call it
  // before each Run, with this rank's weight, if any, and its error so far,
  // `mine`. Returns that error, or another rank's. LOCAL; where gradients may
  // be float16 and there are several ranks, COLLECTIVE in the first call of a
  // step, unless the step before had no weights.
  absl::Status ChooseWeightUnit(const absl::Status& mine,
                                std::optional<double> weight);
  double weight_unit() const { return measure_.unit; }

  // Drops all gradients, also those in .grad(). LOCAL.
  void Zero();

  // Whether zero_grad() of the module or an optimizer was called, since the
  // last Run, on all parameters that have gradients: the caller must do what it
  // asks for. FailedPrecondition if it was called on some of them only. LOCAL.
  absl::StatusOr<bool> WasZeroedByUser() const;

  // Returns FailedPrecondition, once, if .grad() of a parameter whose gradient
  // is here was read since the last Run, as clip_grad_norm_ and torch::optim
  // do: it is undefined, so they did nothing. LOCAL.
  absl::Status TakeLooks();

  // The weight of all ranks and micro-batches since Zero, in units; 0 without
  // weights.
  double total_weight() const { return total_weight_; }
  // Returns what the step's gradient must be divided by, with weights.
  double weight_divisor() const;

  // Whether a Run is in progress. LOCAL; from any thread.
  bool runs() const { return running_ != nullptr; }

  // Whether some flat was used outside of any graph since Zero.
  bool AnyUsedWithoutGrad() const;

  // Whether autograd has made a gradient outside of a Run: by the user's own
  // backward, or another engine's. LOCAL; from any thread.
  bool any_outside() const { return any_outside_.load(); }

  // The number of successful Runs since Zero that reduced; identical on all
  // ranks.
  int64_t num_reductions() const { return num_reductions_; }

  // Whether some rank has used up gradients in the last Run; true, too, if that
  // failed before the ranks have told each other. LOCAL.
  bool any_used_up() const { return any_used_up_; }

  // Makes this thread's current stream wait for Run's work. LOCAL.
  void Enter() { stream_.Enter(); }
  // Returns a flat's gradient, by number in the model's order. REQUIRES: Enter.
  const FlatGradient& of(size_t flat) const { return *flats_[flat]; }
  FlatGradient& of(size_t flat) { return *flats_[flat]; }

  // Returns FailedPrecondition with a parameter whose gradient is not reduced:
  // from a Run that did not reduce, from a bare loss.backward(), or put there
  // by hand. LOCAL.
  absl::Status CheckNothingPending() const;

  // Returns FailedPrecondition with a parameter whose hook was replaced, or
  // whose storage is no longer the flat's. LOCAL.
  absl::Status CheckAttached() const;

  // Returns the bytes that the step's gradients take, from Backward to Step.
  int64_t resident_bytes() const;

 private:
  Communicator& everyone() const {
    return options_.together == nullptr ? *comm_ : *options_.together;
  }
  class ArrivalHook;

  void MakeBuckets();
  const MicroBatch& running() const { return *running_; }  // REQUIRES: runs
  FlatGradient::Arrival HowNow() const;
  void Arrived(int flat, int parameter, const at::Tensor& tensor);
  absl::Status TakeOutside();
  void ForgetAccesses();
  absl::Status LaunchReady(bool all);
  absl::Status FinishInFlight();
  absl::Status FinishStoring();
  absl::Status TellReduced(bool stored);
  absl::Status EndLocal(const absl::Status& backward);
  absl::Status ReduceRest(absl::Status mine);
  bool AnyGathersTogether() const;
  absl::Status AgreeOnFailing(const absl::Status& mine);
  absl::Status Agree(const absl::Status& mine, std::vector<bool>* arrived,
                     std::vector<bool>* held);
  bool UsedUp() const;
  absl::Status CheckNoneLate(const FlatGradient& flat,
                             const std::vector<bool>& came,
                             const std::vector<bool>& late) const;
  std::string TakePlacedWrites() const;
  absl::Status AddWeights(const std::vector<double>& weights);
  double unsent_weight() const;
  absl::Status Commit(const std::vector<bool>& arrived,
                      const std::vector<bool>& held);
  void Discard();
  MeanOptions mean() const;
  // How many ranks have samples of their own.
  int data_ranks() const {
    return comm_->world_size() / options_.ranks_of_sample;
  }
  void Measure(const std::vector<double>& weights);

  // How weights of a step count.
  struct WeightMeasure {
    bool chosen = false;
    double unit = 1;         // a weight of so many samples counts as 1
    double sum_divisor = 1;  // of means: what sums over ranks are divided by
  };
  enum class Weights { kUnknown, kGiven, kNone };

  std::shared_ptr<Communicator> comm_;
  std::vector<std::unique_ptr<FlatGradient>> flats_;
  // By flat and parameter: accesses to .grad(), also for changes, since the
  // last Run (base/torch/grad_access.h); null where they are not counted.
  std::vector<std::vector<GradAccesses*>> accesses_;
  absl::Mutex mutex_;  // hooks against each other
  const GradientOptions options_;
  StreamChain stream_;  // of all work on gradients
  // Buckets in the order in which they are launched.
  std::vector<std::vector<FlatGradient*>> buckets_;
  std::atomic<const MicroBatch*> running_ = nullptr;  // null: not within Run
  size_t cursor_ = 0;                                 // buckets launched
  std::unique_ptr<Reduction> in_flight_;              // null: none
  std::vector<FlatGradient*> storing_;   // elsewhere, while the next is reduced
  bool half_ = false;                    // gradients may be float16 somewhere
  WeightMeasure measure_;                // since Zero
  Weights weights_ = Weights::kUnknown;  // as the last agreement had them
  std::atomic<bool> any_outside_ = false;
  bool failed_ = false;       // this rank's backward, in the running Run
  bool any_used_up_ = false;  // of all ranks, in the last Run
  double total_weight_ = 0;
  int64_t num_reductions_ = 0;
  // The weights of Runs that did not reduce, and their first error.
  double local_weight_ = 0;
  absl::Status local_failure_;
};

}  // namespace tessera
#endif  // SHARDING_GRADIENT_GRADIENTS_H_
