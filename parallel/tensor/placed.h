// Placed tensors: tensors of which each rank of a group has a part, which
// unmodified code uses as if it had the whole.
//
//   S(d)     this rank's slice along dimension d; slices follow by rank
//   S(d, g)  the dimension is g equal groups, as [q | k | v]; this rank has its
//            slice of each of them, one after the other
//   copy     the whole, equal on all ranks; each has an addend of the gradient,
//            as in data parallelism. What is computed of copies alone is a copy
//   view     a view of a whole that was gathered: to be read only, since a
//            write would not reach the parts
//   (none)   an ordinary tensor, equal on all ranks
//
// A placed tensor has the sizes of the whole, no memory of its own, and the
// part in its backend_meta(). Its key, above autograd, has every operator that
// gets one come to dispatch.cc first, where a rule computes with parts. So
// autograd, parameters' tags (sharding/dispatch) and recomputation see parts
// alone.
//
// What is equal on all ranks stays an ordinary tensor: it costs nothing, and
// operators that have no rule are right. Its gradient is equal on all ranks,
// too: where an ordinary tensor meets parts, backward adds up what comes back
// (Megatron-LM's f; Shoeybi et al., 2019).
//
// Gradients, hooks and versions are those of the part (gradients.h).
//
// All ranks of a group must call the same operators on placed tensors, in one
// order. Errors of communication are thrown as StatusException.
#ifndef PARALLEL_TENSOR_PLACED_H_
#define PARALLEL_TENSOR_PLACED_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "ATen/core/Tensor.h"
#include "base/above/above_autograd.h"
#include "parallel/tensor/divide_sequence.h"
#include "parallel/tensor/part_group.h"

namespace tessera {

struct TensorPlacement {
  enum Kind { kShard, kCopy, kWholeView };
  Kind kind = kShard;
  int64_t dim = 0;     // of kShard; not negative
  int64_t groups = 1;  // of kShard; in the whole

  static TensorPlacement Shard(int64_t dim, int64_t groups = 1) {
    return {kShard, dim, groups};
  }
  static TensorPlacement Copy() { return {kCopy, 0, 1}; }
  static TensorPlacement WholeView() { return {kWholeView, 0, 1}; }
};

inline bool operator==(const TensorPlacement& a, const TensorPlacement& b) {
  return a.kind == b.kind && (a.kind != TensorPlacement::kShard ||
                              (a.dim == b.dim && a.groups == b.groups));
}

// Placed is kept by a placed tensor in place of memory.
struct Placed : c10::BackendMeta {
  Placed(at::Tensor part, TensorPlacement placement,
         std::shared_ptr<PartGroup> group)
      : part(std::move(part)), placement(placement), group(std::move(group)) {}

  // Makes what a tensor's data() has: it has no history.
  c10::intrusive_ptr<c10::BackendMeta> clone(
      const c10::intrusive_ptr<c10::BackendMeta>& /*self*/) const override {
    return c10::make_intrusive<Placed>(part.detach(), placement, group);
  }

  at::Tensor part;
  TensorPlacement placement;
  std::shared_ptr<PartGroup> group;
  // The placed tensor that this is a view of; null: none, or it is gone.
  c10::weak_intrusive_ptr<c10::TensorImpl> base{
      c10::intrusive_ptr<c10::TensorImpl>()};
  // Takes gradients of a parameter to its part; null: it is not one.
  std::shared_ptr<torch::autograd::Node> accumulator;
};

// Returns null for an ordinary or undefined tensor.
inline Placed* PlacedOf(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.key_set().has(kAboveKey)) return nullptr;
  return static_cast<Placed*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
}

// Returns a placed tensor. With S(d) its size along d is the part's times the
// ranks. LOCAL.
at::Tensor Place(at::Tensor part, TensorPlacement placement,
                 std::shared_ptr<PartGroup> group);

// Makes `parameter`, which is whole, a placed one with that part; whoever holds
// it has the placed one then, and its memory is given back, unless a copy's
// part is in it. REQUIRES: `part` has this rank's slice of its sizes. LOCAL.
void PlaceInPlace(const at::Tensor& parameter, at::Tensor part,
                  TensorPlacement placement, std::shared_ptr<PartGroup> group);

// Makes a parameter that PlaceInPlace has placed an ordinary one with the whole
// in memory of its own, or in its part's where that is a copy. COLLECTIVE.
void GatherInPlace(const at::Tensor& parameter);

// Has a placed parameter have the dtype that its part has by now. LOCAL.
void RenewDtype(const at::Tensor& parameter);

// Returns the part of a placed tensor, or the tensor: what an engine knows of a
// parameter.
inline const at::Tensor& PartOrSelf(const at::Tensor& tensor) {
  const Placed* const placed = PlacedOf(tensor);
  return placed == nullptr ? tensor : placed->part;
}

// Has what autograd knows of a placed tensor follow its part, which was written
// in place. Hooks stay with what it was before.
void RenewHistory(const at::Tensor& tensor);

// Returns the part of a placed tensor by which autograd goes on, or the tensor.
at::Tensor PartForUse(const at::Tensor& tensor);

// Returns the whole for a computation with parts: the gradient of each rank is
// an addend of the whole one. COLLECTIVE if it is divided; in backward, if it
// is no copy.
at::Tensor WholeForParts(const at::Tensor& tensor,
                         const std::shared_ptr<PartGroup>& group);

// Returns this rank's part of the tensor, through autograd. COLLECTIVE if it is
// divided otherwise; in backward, if it is not placed. REQUIRES: kShard.
at::Tensor PartAs(const at::Tensor& tensor, const TensorPlacement& placement,
                  const std::shared_ptr<PartGroup>& group);
inline at::Tensor PartAs(const at::Tensor& tensor, int64_t dim,
                         const std::shared_ptr<PartGroup>& group) {
  return PartAs(tensor, TensorPlacement::Shard(dim), group);
}

// Returns an ordinary tensor as a placed one of which this rank has its part.
// REQUIRES: kShard, and ranks that divide the dimension. COLLECTIVE in
// backward.
inline at::Tensor Divide(const at::Tensor& whole, TensorPlacement placement,
                         const std::shared_ptr<PartGroup>& group) {
  return Place(PartAs(whole, placement, group), placement, group);
}

// Returns this rank's part of an ordinary tensor, in memory of its own, without
// autograd. REQUIRES: kShard, and ranks that divide the dimension. LOCAL.
at::Tensor SlicePart(const at::Tensor& whole, const TensorPlacement& placement,
                     const PartGroup& group);

}  // namespace tessera
#endif  // PARALLEL_TENSOR_PLACED_H_
