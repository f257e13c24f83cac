// MetaCall: holds the arguments of an operator as tensors of the meta device,
// which have sizes but no memory, and identifies its results in terms of them.
//
//   arguments --> twins on meta --> the operator's Meta kernel, or a rule
//                                             |
//   results: an argument itself, a view of one, or a new tensor
//
// Twins of tensors that share a storage share one, too.
#ifndef SHARDING_TRACE_META_CALL_H_
#define SHARDING_TRACE_META_CALL_H_

#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/core/stack.h"

namespace tessera {

class MetaCall {
 public:
  // Makes twins of the `n` values on top of `stack`. `device`: which of them is
  // the device, -1: none.
  MetaCall(const torch::jit::Stack& stack, size_t n, int device);

  struct Twin {
    at::Tensor original;
    at::Tensor meta;
  };
  const std::vector<Twin>& twins() const { return twins_; }
  // The operator's arguments on meta.
  const torch::jit::Stack& arguments() const { return arguments_; }

  // Returns the arguments as zeros on the CPU; these are the twins then.
  torch::jit::Stack OnZeros();

  // Returns the twin that `meta` is; null: no argument's.
  const Twin* Find(const at::Tensor& meta) const;
  // Returns an argument whose twin shares the storage of `meta`; null: it is a
  // new tensor.
  const Twin* FindStorage(const at::Tensor& meta) const;

 private:
  at::Tensor TwinOf(const at::Tensor& original);

  std::vector<Twin> twins_;
  torch::jit::Stack arguments_;
};

// Returns a tensor of the CPU over `storage` that lies there as `like`, on
// meta, does over its own.
at::Tensor OnCpu(const at::Tensor& like, c10::Storage storage);

inline c10::StorageImpl* StorageOf(const at::Tensor& t) {
  return t.storage().unsafeGetStorageImpl();
}

}  // namespace tessera
#endif  // SHARDING_TRACE_META_CALL_H_
