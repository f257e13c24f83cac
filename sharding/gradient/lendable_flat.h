// LendableFlat: a flat buffer whose places may be lent as the memory of
// tensors, so that what belongs there need not be copied.
//
// What is lent may become anything and live as long as it likes: it keeps the
// memory, all of the flat's, and the flat moves away from it before anything
// else is written there. From then on, until Begin, nothing more is lent: no
// more than that one flat is kept.
//
// Threads: none of its own; what was lent may be freed on any thread.
#ifndef SHARDING_GRADIENT_LENDABLE_FLAT_H_
#define SHARDING_GRADIENT_LENDABLE_FLAT_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "base/layout/flat_buffer.h"
#include "c10/core/Allocator.h"
#include "sharding/flat/flat_parameter.h"

namespace tessera {

// Whether the caller's is the only reference to its memory: else others may
// write there yet, as libtorch does where it adds gradients up.
bool HasOneOwner(const at::Tensor& tensor);

class LendableFlat {
 public:
  // Lends places of `least_bytes` or more; 0: none.
  LendableFlat(const FlatParameter& flat, int64_t least_bytes);
  LendableFlat(const LendableFlat&) = delete;
  LendableFlat& operator=(const LendableFlat&) = delete;

  // New memory; what is lent keeps the old one.
  void Hold(FlatBuffer flat);
  void Reset();
  void Begin() { moved_ = false; }  // a backward
  bool defined() const { return buffer_ != nullptr; }
  // REQUIRES of all below: defined.
  const FlatBuffer& operator*() const { return *buffer_; }
  const FlatBuffer* operator->() const { return buffer_.get(); }
  // Whether nobody else holds the memory, and Take may give it away.
  bool has_one_owner() const { return buffer_.use_count() == 1; }
  // The memory, for another owner. REQUIRES: has_one_owner.
  FlatBuffer Take();

  // Bytes that the parameter's place has and Lend would give, if the flat is of
  // the parameter's own dtype; 0 where it never does.
  int64_t LendableBytes(int parameter) const {
    return lendable_[Index(parameter)];
  }
  // Null while the place is lent already, or since the flat moved away.
  c10::DataPtr Lend(int parameter);
  // Whether `tensor`, of the parameter's sizes and strides, is what was lent,
  // and the caller's alone: then its values are in their place, and stay.
  bool LiesInPlace(int parameter, const at::Tensor& tensor) const;
  // So that the place may be written to. ResourceExhausted.
  absl::Status Vacate(int parameter);
  // And all places.
  absl::Status VacateAll();

 private:
  static size_t Index(int parameter) { return static_cast<size_t>(parameter); }
  char* PlaceOf(int parameter) const;
  bool IsLent(int parameter) const;
  absl::Status MoveAway();

  const FlatParameter* flat_;
  std::vector<int64_t> lendable_;
  std::shared_ptr<FlatBuffer> buffer_;  // of what is lent, too
  bool moved_ = false;
};

}  // namespace tessera
#endif  // SHARDING_GRADIENT_LENDABLE_FLAT_H_
