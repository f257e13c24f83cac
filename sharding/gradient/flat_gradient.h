// FlatGradient: the gradient of one flat parameter, from what hooks bring to
// the owner's slice of the mean over ranks.
//
//                     stage 0       stage 1         stages 2, 3
//   local flat        [P] kept      [P] kept        [P] until it is reduced
//   reduced           in local      own slice of it [S] from there to Zero
//   accumulating      + [P]         + [S]           + [S] during backward
//
// The local flat is of the reduce dtype, or while micro-batches are added up in
// it before they are reduced of the wider of that and the gradient dtype. The
// reduced one is of the gradient dtype (that of the masters, or a smaller one);
// where that is not the reduce dtype it has memory of its own at every stage.
// What is added to it is added in the master dtype and rounded once.
//
// A micro-batch goes
//
//   Add*  Outgoing  TakeSums  Commit       what arrived in time
//     OutgoingHeld  TakeSums  Commit       what was held, if any rank held some
//   DropMicroBatch
//
// (sharding/gradient/reduction.h makes the calls between Add and Commit). Until
// Commit nothing of it has touched the step's gradient, so it can be dropped at
// any point.
//
// What becomes of one parameter's gradient within a micro-batch:
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
#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/layout/flat_buffer.h"
#include "offload/tiered_buffer.h"
#include "sharding/flat/flat_parameter.h"

namespace tessera {

class FlatGradient {
 public:
  // `expected[i]`: parameter i of the flat is expected to get a gradient; the
  // same on all ranks.
  FlatGradient(std::shared_ptr<FlatParameter> flat,
               const std::vector<bool>& expected);

  // What to do with a gradient that arrives.
  enum class Arrival : uint8_t {
    kAdd,                // to the local flat gradient, in the reduce dtype
    kAccumulateLocally,  // the same, in the wider of it and gradient_dtype()
    kZero,               // counts as arrived, with zeros
  };
  // Adds a gradient of this micro-batch to the local flat gradient (the first
  // one is copied), or holds it for OutgoingHeld where the parameter was not
  // expected or Outgoing has been called. Where it may be one of several of the
  // micro-batch (`partial`), these are first added up in their own dtype, as
  // libtorch does, until Fold. Dense or sparse, any dtype. LOCAL.
  absl::Status Add(int parameter, const at::Tensor& gradient, Arrival how,
                   bool partial);
  // The backward of a micro-batch that stays on this rank is over. LOCAL.
  absl::Status Fold();
  // A backward begins: what came before is no arrival of it. `may_nest`: it may
  // start others within itself.
  void Begin(bool may_nest);
  // More may come after every parameter has arrived: complete only at the end.
  void SetLate() { late_ = true; }
  bool late() const { return late_; }

  bool AnyExpected() const { return num_expected_ > 0; }
  // Every expected parameter has arrived in this backward, and nothing hints at
  // more to come.
  bool Complete() const { return num_missing_ == 0 && !late_; }

  // The local flat gradient [P] in the reduce dtype, divided by `predivide`;
  // what did not arrive is zero. Gradients that come from now on are held.
  absl::StatusOr<at::Tensor> Outgoing(double predivide);
  // The same of what was held, after Commit: what the agreement found on some
  // rank, zero where this one held nothing. Forgets the sums of before. LOCAL.
  // ResourceExhausted.
  absl::StatusOr<at::Tensor> OutgoingHeld(double predivide);
  // What either gave was copied and is not read any more. LOCAL.
  void DropOutgoing();
  // Where the sums over ranks of the owned slice of `whole`, which either gave,
  // had best be written, [owned] of the reduce dtype: for TakeSums.
  // LOCAL. ResourceExhausted.
  absl::StatusOr<at::Tensor> PlaceOfSums(const at::Tensor& whole);
  // These sums, copied or in place; the mean is sums / divisor.
  absl::Status TakeSums(const at::Tensor& sums, double divisor);
  // Adds the sums to the step's gradient, of those parameters that some rank
  // had (the agreement of all): that arrived, or that were held. LOCAL.
  absl::Status Commit(const std::vector<bool>& had);
  // Forgets the micro-batch, whatever came of it.
  void DropMicroBatch();
  // Forgets the step's gradient too.
  void Zero();

  FlatParameter& flat() const { return *flat_; }
  size_t num_parameters() const { return parameters_.size(); }
  bool arrived(size_t parameter) const {
    return parameters_[parameter].state != State::kAbsent;
  }
  bool held(size_t parameter) const {
    return parameters_[parameter].held.defined();
  }
  void set_expected(const std::vector<bool>& expected);
  // Some rank had a gradient for it since Zero; the same on all ranks.
  bool has_gradient(size_t parameter) const {
    return parameters_[parameter].in_step;
  }
  // The same of all parameters, and of those that are expected to.
  std::vector<bool> has_gradient() const;
  std::vector<bool> expected() const;
  bool has_step_gradient() const {
    return in_place_ || reduced_.defined() || is_stored_;
  }
  // This rank's slice of the step's gradient, [owned] of gradient_dtype(); only
  // ranges of parameters with has_gradient hold one. Undefined if there is
  // none. REQUIRES: Raise, where it may lie elsewhere
  // (FlatParameterOptions::gradients).
  at::Tensor owned() const;
  // The same, or where the step has none yet what it will be when this
  // micro-batch is committed. REQUIRES: TakeSums.
  at::Tensor coming() const;
  // It is in memory while what this returns is there. LOCAL.
  absl::StatusOr<Raised> Raise() const;
  // The same, for who changes it.
  absl::StatusOr<Raised> RaiseToChange();
  // The same, given away: there is none from then on. Undefined where it lies
  // elsewhere: it is read there until the flat is updated. REQUIRES: stages 2
  // and 3.
  FlatBuffer TakeStepGradient();
  // Where the step's gradient lies, if that is elsewhere; else null.
  TieredBuffer* elsewhere() const { return is_stored_ ? &stored() : nullptr; }
  // There is a step's gradient, to which sums are added; else they become it.
  bool accumulating() const;
  // What TakeSums has sent elsewhere is there, and no longer in memory.
  // LOCAL.
  absl::Status FinishStore();
  // The whole gradient of a parameter, in its shape and the master dtype;
  // undefined without one. COLLECTIVE.
  absl::StatusOr<at::Tensor> Whole(int parameter) const;
  // Bytes that the step's gradient takes, from Backward to Step.
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
    // From one micro-batch to the next.
    bool expected = false;  // as the constructor was told
    bool in_step = false;   // the step's gradient has one
    // In the backward that runs (a micro-batch may have several).
    bool seen = false;
    // In this micro-batch.
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
  // What Add does, by what it finds.
  void AddHeld(ParameterGradient* p, const at::Tensor& gradient, Arrival how);
  void AddPartial(ParameterGradient* p, const at::Tensor& gradient,
                  Arrival how);
  absl::Status AddZero(int parameter, Arrival how);
  absl::Status AddToPlace(int parameter, const at::Tensor& gradient,
                          Arrival how);
  absl::Status WritePlace(int parameter, const at::Tensor& gradient,
                          bool first);

  // Fold of small ones of a device, all at once.
  absl::Status FoldSmall();

  bool AnyArrived() const;
  bool reduces_in_place() const;
  absl::Status EnsureLocal(at::ScalarType dtype);
  absl::StatusOr<FlatBuffer> AllocateReduced(Fill fill) const;
  absl::Status EnsureReduced(Fill fill);
  at::ScalarType DtypeOf(Arrival how) const;
  bool LiesLikeItsPlace(int parameter, const at::Tensor& gradient) const;
  // The parameter's place in a flat buffer [P], in its own shape.
  at::Tensor PlaceIn(const FlatBuffer& buffer, int parameter) const;
  // step's gradient (+)= the slices of `mean`, [owned], of those that had one.
  void Accumulate(const std::vector<bool>& had, const at::Tensor& mean);
  // In the master dtype.
  at::Tensor Mean(const at::Tensor& sums, double divisor) const;
  // `mean`: of gradient_dtype(), [owned]; may be `sums`.
  void Divide(const at::Tensor& sums, double divisor,
              const at::Tensor& mean) const;
  absl::Status StartStore();
  absl::Status AwaitReaders();
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
  // The step's gradient is the owned range of local_ itself.
  bool in_place_ = false;
};

}  // namespace tessera
#endif  // SHARDING_GRADIENT_FLAT_GRADIENT_H_
