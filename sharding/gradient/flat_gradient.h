// FlatGradient: the gradient of one flat parameter, from its arrival in hooks
// to the owner's slice of the mean over ranks.
//
//                     stage 0       stage 1         stages 2, 3
//   local flat        [P] kept      [P] kept        [P] until it is reduced
//   reduced           in local      own slice of it [S] from there to Zero
//   accumulating      + [P]         + [S]           + [S] during backward
//
// The local flat has the reduce dtype or, while micro-batches are added up in
// it before they are reduced, the wider of that and the gradient dtype. The
// reduced gradient has the gradient dtype (the masters', or a smaller one);
// where that is not the reduce dtype, it has memory of its own at every stage.
// Sums are added to it in the master dtype and rounded once. The first sums of
// a rank that is alone stay in their own, narrower dtype until sums are added
// or they are changed (FlatParameterOptions::narrow_gradients).
//
// A micro-batch goes
//
//   Add*  Outgoing  TakeSums  Commit       what arrived in time
//     OutgoingHeld  TakeSums  Commit       what was held, if any rank held some
//   DropMicroBatch
//
// (sharding/gradient/reduction.h makes the calls between Add and Commit). Until
// Commit the step's gradient is unchanged, so the micro-batch can be dropped at
// any point.
//
// The states of one parameter's gradient within a micro-batch are:
//
//             Add                     Add, partial
//   kAbsent -----------> kPlaced ------------------> kPlacedAndPartial
//      |                    ^                              |
//      | Add, partial       | Fold, Outgoing               |
//      +------> kPartial ---+------------------------------+
//
// and DropMicroBatch leads from everywhere to kAbsent.
//
// Threads: none of its own; the caller orders the calls.
#ifndef SHARDING_GRADIENT_FLAT_GRADIENT_H_
#define SHARDING_GRADIENT_FLAT_GRADIENT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/layout/flat_buffer.h"
#include "base/stream/stream_point.h"
#include "offload/tiered_buffer.h"
#include "sharding/flat/flat_parameter.h"

namespace tessera {

class FlatGradient {
 public:
  // `expected[i]`: whether parameter i of the flat is expected to get a
  // gradient; identical on all ranks.
  FlatGradient(std::shared_ptr<FlatParameter> flat,
               const std::vector<bool>& expected);
  ~FlatGradient();

  // What to do with a gradient that arrives.
  enum class Arrival : uint8_t {
    kAdd,                // to the local flat gradient, in the reduce dtype
    kAccumulateLocally,  // to it in the wider of that and gradient_dtype()
    kZero,               // counts as arrived, with zeros
  };
  // Adds a gradient of this micro-batch to the local flat gradient (the first
  // one is copied), or holds it for OutgoingHeld where the parameter was not
  // expected or Outgoing has been called. Where it may be one of several of the
  // micro-batch (`partial`), these are first added up in their own dtype, as
  // libtorch does, until Fold. Dense or sparse, any dtype. LOCAL.
  absl::Status Add(int parameter, const at::Tensor& gradient, Arrival how,
                   bool partial);
  // Adds partial gradients to their places: the backward of a micro-batch that
  // stays on this rank is over. LOCAL.
  absl::Status Fold();
  // Begins a backward: gradients that came before do not count as its arrivals.
  // `may_nest`: it may start others within itself.
  void Begin(bool may_nest);
  // Makes it complete only at the end, since more may come after every
  // parameter has arrived.
  void SetLate() { late_ = true; }
  bool late() const { return late_; }

  // Whether every expected parameter has arrived in this backward.
  bool AllArrived() const { return num_missing_ == 0; }
  bool AnyExpected() const { return num_expected_ > 0; }
  // Whether every expected parameter has arrived in this backward and no more
  // can come.
  bool Complete() const { return num_missing_ == 0 && !late_; }

  // Returns the local flat gradient [P] in the reduce dtype, divided by
  // `predivide`; what did not arrive is zero. Gradients that arrive from now on
  // are held.
  absl::StatusOr<at::Tensor> Outgoing(double predivide);
  // Returns the held gradients in the same form, after Commit, if the agreement
  // found some on any rank; zero where this rank held nothing. Forgets the
  // earlier sums. LOCAL. ResourceExhausted.
  absl::StatusOr<at::Tensor> OutgoingHeld(double predivide);
  // Drops what Outgoing or OutgoingHeld returned: it was copied and is not read
  // any more. LOCAL.
  void DropOutgoing();
  // Returns the best place for the sums over ranks of the owned slice of
  // `whole`, which Outgoing or OutgoingHeld returned: [owned] of the reduce
  // dtype, for TakeSums. LOCAL. ResourceExhausted.
  absl::StatusOr<at::Tensor> PlaceOfSums(const at::Tensor& whole);
  // Takes the sums, copied or in place, and may write over them; the mean is
  // sums / divisor.
  absl::Status TakeSums(const at::Tensor& sums, double divisor);
  // Adds the sums to the step's gradient, for the parameters that some rank had
  // by the agreement: arrived ones, or held ones. FinishStore ends that. LOCAL.
  absl::Status Commit(const std::vector<bool>& had);
  // Forgets the micro-batch, whatever its state.
  void DropMicroBatch();
  // Forgets the step's gradient too.
  void Zero();
  // Drops memory that stages 0 and 1 keep for the next step. REQUIRES: Zero.
  void DropLocal() { local_.Reset(); }

  FlatParameter& flat() const { return *flat_; }
  size_t num_parameters() const { return parameters_.size(); }
  bool arrived(size_t parameter) const {
    return parameters_[parameter].state != State::kAbsent;
  }
  bool held(size_t parameter) const {
    return parameters_[parameter].held.defined();
  }
  void set_expected(const std::vector<bool>& expected);
  // Whether some rank had a gradient for the parameter since Zero; identical on
  // all ranks.
  bool has_gradient(size_t parameter) const {
    return parameters_[parameter].in_step;
  }
  // By parameter: has_gradient, and whether a gradient is expected.
  std::vector<bool> has_gradient() const;
  std::vector<bool> expected() const;
  bool has_step_gradient() const {
    return in_place_ || reduced_.defined() || is_stored_;
  }
  // Returns this rank's slice of the step's gradient, [owned] of
  // gradient_dtype() or kept_gradient_dtype(); only ranges of parameters with
  // has_gradient are valid. Undefined if there is none. REQUIRES: Raise, where
  // it may be offloaded (FlatParameterOptions::gradients_tier).
  at::Tensor owned() const;
  // As owned(); where the step has no gradient yet, what it will be when this
  // micro-batch is committed. REQUIRES: TakeSums.
  at::Tensor coming() const;
  // Keeps the step's gradient in memory while the result lives. LOCAL.
  absl::StatusOr<Raised> Raise() const;
  // As Raise, for callers that change the gradient: it has gradient_dtype()
  // from then on. ResourceExhausted.
  absl::StatusOr<Raised> RaiseToChange();
  // Gives away the step's gradient: there is none from then on. Undefined where
  // it is offloaded: it is read there until the flat is updated. REQUIRES:
  // stages 2 and 3.
  FlatBuffer TakeStepGradient();
  // Drops the sums that were to be the step's gradient, since coming() has been
  // used. The step has no gradient of the expected parameters then, though
  // has_gradient says that some rank had one. REQUIRES: TakeSums,
  // !accumulating(). LOCAL.
  void UseUp();
  bool used_up() const;
  // Returns has_gradient() without what was used up.
  std::vector<bool> left() const;
  // Starts to copy coming() to `host`, which is on the host, of this unit, on a
  // stream of its own (TierRoom::StartCopyFrom). What next changes or frees the
  // gradient comes after that. LOCAL, ASYNC. REQUIRES: elsewhere() is null.
  absl::Status StartCopyTo(TieredBuffer* host);
  // Returns where the step's gradient lies if it is offloaded; else null.
  TieredBuffer* elsewhere() const { return is_stored_ ? &stored() : nullptr; }
  // Whether there is a step's gradient, to which sums are added; else they
  // become it.
  bool accumulating() const;
  // Sets what is taken of the step's gradient, [owned], while it is on its
  // device, each time before it leaves it: small tensors there. It may throw
  // c10::Error.
  using Measure = std::function<at::Tensor(const FlatGradient& gradient,
                                           const at::Tensor& owned)>;
  void SetMeasure(Measure measure) { measure_ = std::move(measure); }
  // Returns what was taken of the step's gradient as it is elsewhere now;
  // undefined: nothing.
  const at::Tensor& measured() const { return measured_; }
  // Waits until what TakeSums or Commit offloads is written, and frees its
  // memory; on a device the current stream waits. LOCAL.
  absl::Status FinishStore();
  // Returns the whole gradient of a parameter, in its shape and the master
  // dtype; undefined without one. COLLECTIVE.
  absl::StatusOr<at::Tensor> Whole(int parameter) const;
  // Returns the bytes that the step's gradient takes, from Backward to Step.
  int64_t resident_bytes() const;

 private:
  // Where this micro-batch's gradient of a parameter is: see above.
  enum class State : uint8_t {
    kAbsent,            // has not arrived
    kPartial,           // in `partial` alone
    kPlaced,            // in its place in local_, not in `partial`
    kPlacedAndPartial,  // in its place, and `partial` is to be added
  };
  struct ParameterGradient {
    // These last from one micro-batch to the next.
    bool expected = false;  // see the constructor and set_expected
    bool in_step = false;   // the step's gradient has one
    bool used_up = false;   // it was dropped by UseUp
    // It arrived in the running backward (a micro-batch may have several).
    bool seen = false;
    // These are of this micro-batch.
    State state = State::kAbsent;
    Arrival partial_how = Arrival::kAdd;
    at::Tensor partial;  // sum so far, in the gradients' own dtype
    at::Tensor held;     // sum so far: to be reduced after the agreement

    bool placed() const {
      return state == State::kPlaced || state == State::kPlacedAndPartial;
    }
  };

  static size_t Index(int parameter) { return static_cast<size_t>(parameter); }
  ParameterGradient& At(int parameter) { return parameters_[Index(parameter)]; }
  // The cases of Add.
  void AddHeld(ParameterGradient* p, const at::Tensor& gradient, Arrival how);
  void AddPartial(ParameterGradient* p, const at::Tensor& gradient,
                  Arrival how);
  absl::Status AddZero(int parameter, Arrival how);
  absl::Status AddToPlace(int parameter, const at::Tensor& gradient,
                          Arrival how);
  absl::Status WritePlace(int parameter, const at::Tensor& gradient,
                          bool first);

  // Folds the small partial gradients of a device all at once.
  absl::Status FoldSmall();

  bool AnyArrived() const;
  bool reduces_in_place() const;
  absl::Status EnsureLocal(at::ScalarType dtype);
  absl::Status EnsureReduced(at::ScalarType dtype, Fill fill);
  // Moves the step's gradient to reduced_, in gradient_dtype().
  absl::Status MoveOut();
  at::ScalarType DtypeOf(Arrival how) const;
  bool LiesLikeItsPlace(int parameter, const at::Tensor& gradient) const;
  // Returns the parameter's place in a flat buffer [P], in its own shape.
  at::Tensor PlaceIn(const FlatBuffer& buffer, int parameter) const;
  // Adds the slices of `mean`, [owned], of the parameters in `had` to the
  // step's gradient, or sets it.
  void Accumulate(const std::vector<bool>& had, const at::Tensor& mean);
  // Returns the mean in the master dtype, in the memory of `sums` if that is
  // their dtype.
  at::Tensor Mean(const at::Tensor& sums, double divisor) const;
  // Writes sums / divisor to `mean`, [owned], which may be `sums`; these may be
  // written, too.
  void Divide(const at::Tensor& sums, double divisor,
              const at::Tensor& mean) const;
  absl::Status StartStore();
  // The step's gradient is not, or no longer, what is elsewhere.
  void ForgetStored();
  void ForgetMeasured();
  // Returns the dtype of a step's first sums.
  at::ScalarType kept_dtype() const;
  absl::Status AwaitReaders();
  // Makes the current stream wait for what StartCopyTo has started. Throws
  // c10::Error.
  void OrderAfterCopy();
  TieredBuffer& stored() const {
    return flat_->states().At(ShardStates::kGradient);
  }

  std::shared_ptr<FlatParameter> flat_;
  std::vector<Range> gaps_;  // between the parameters, in the flat buffer
  std::vector<ParameterGradient> parameters_;
  int num_expected_ = 0;
  int num_missing_ = 0;  // of these, in the backward that runs

  bool sent_ = false;  // Outgoing or OutgoingHeld, in this micro-batch
  bool late_ = false;
  // Sums of a micro-batch that is to be added to earlier ones.
  at::Tensor sums_;  // [owned], in local_ or in
  FlatBuffer sums_memory_;
  double divisor_ = 1;

  FlatBuffer local_;     // [P]
  FlatBuffer outgoing_;  // [P], where local_ is of another dtype; what was held
  FlatBuffer reduced_;   // [owned], unless in_place_ or is_stored_
  bool is_stored_ = false;  // the step's gradient is in stored()
  bool widened_ = false;    // one that goes to the host was, once
  Measure measure_;
  at::Tensor measured_;  // of stored()
  // The step's gradient is the owned range of local_ itself.
  bool in_place_ = false;
  StreamPoint copied_;  // of StartCopyTo
};

}  // namespace tessera
#endif  // SHARDING_GRADIENT_FLAT_GRADIENT_H_
