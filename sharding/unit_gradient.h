// UnitGradient: the gradient of one unit, from what hooks bring to the owner's
// averaged part of it.
//
//                     stage 0       stage 1         stages 2, 3
//   local flat        [P] kept      [P] kept        [P] until it is reduced
//   reduced           in local      own slice of it [S] kept
//   accumulating      + [P]         + [S]           + [S] during backward
//
// A micro-batch goes Store/Hold*, Launch, Finish, Commit, ReduceHeld, and ends
// with DropMicroBatch; until Commit nothing of it has touched the step's
// gradient, so it can be dropped at any point.
//
// Threads: none of its own; the caller orders the calls.
#ifndef SHARDING_UNIT_GRADIENT_H_
#define SHARDING_UNIT_GRADIENT_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "comm/communicator.h"
#include "sharding/flat_buffer.h"
#include "sharding/unit.h"

namespace tessera {

class UnitGradient {
 public:
  // `expected[i]`: parameter i of the unit is expected to get a gradient; the
  // same on all ranks.
  UnitGradient(std::shared_ptr<Unit> unit, std::vector<bool> expected);

  // Adds a gradient of this micro-batch to the local flat gradient (the first
  // one is copied), or keeps it for ReduceHeld where the parameter was not
  // expected or the unit is on its way. LOCAL.
  absl::Status Add(int parameter, const at::Tensor& gradient);
  // What a bare backward has left is no arrival of the backward that begins:
  // the unit is complete only at its end.
  void Begin();
  // More may come after every parameter has arrived: complete only at the end.
  void SetLate() { late_ = true; }

  bool AnyExpected() const;
  // Every expected parameter has arrived, and nothing hints at more to come.
  bool Complete() const;

  // Starts the sum over ranks; what did not arrive counts as zero. COLLECTIVE,
  // ASYNC.
  absl::Status Launch();
  // Waits for it. LOCAL.
  absl::Status Finish();
  // Divides by W and adds to the step's gradient those parameters that arrived
  // on some rank (the agreement of all). LOCAL.
  absl::Status Commit(const std::vector<bool>& arrived);
  // Reduces and adds what some rank held back. COLLECTIVE if any did.
  absl::Status ReduceHeld(const std::vector<bool>& held);
  // Forgets the micro-batch, whatever came of it.
  void DropMicroBatch();
  // Forgets the step's gradient too.
  void Zero();

  const Unit& unit() const { return *unit_; }
  size_t num_parameters() const { return expected_.size(); }
  bool arrived(size_t parameter) const { return arrived_[parameter]; }
  bool held(size_t parameter) const { return held_[parameter].defined(); }
  void set_expected(std::vector<bool> expected) {
    expected_ = std::move(expected);
  }
  // Some rank had a gradient for it since Zero; the same on all ranks.
  bool has_gradient(size_t parameter) const { return has_[parameter]; }
  // This rank's part of the averaged gradient, [owned bytes]; only ranges of
  // parameters with has_gradient hold one. Null if there is none.
  char* owned_data() const;
  // The whole averaged gradient of a parameter, in its shape; undefined without
  // one. COLLECTIVE.
  absl::StatusOr<at::Tensor> Whole(int parameter) const;
  // Bytes that stay allocated between uses.
  int64_t resident_bytes() const;

 private:
  bool accumulating() const;
  absl::Status EnsureLocal();
  absl::Status EnsureReduced();
  // The parameter's place in a flat buffer [P], in its own shape.
  at::Tensor PlaceIn(const FlatBuffer& flat, int parameter) const;
  // step's gradient (+)= the owned part of a parameter in `owned_from`.
  void Accumulate(int parameter, const char* owned_from);

  std::shared_ptr<Unit> unit_;
  std::vector<bool> expected_;
  std::vector<bool> has_;

  std::vector<bool> arrived_;     // in local_, not yet reduced
  std::vector<at::Tensor> held_;  // to be reduced after the agreement
  bool launched_ = false;
  bool late_ = false;
  CommFuture pending_;

  FlatBuffer local_;    // [P]
  FlatBuffer reduced_;  // [owned], unless in_place_
  FlatBuffer scratch_;  // [owned], a micro-batch's sum while accumulating
  // The step's gradient is the owned range of local_ itself.
  bool in_place_ = false;
};

}  // namespace tessera
#endif  // SHARDING_UNIT_GRADIENT_H_
