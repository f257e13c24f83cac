// KeptInputs: a region's inputs between forward and backward.
//
//   as autograd would keep them        (sharding/recompute/outside_tensor.h)
//   1/n of the elements on each rank   CheckpointOptions::partition_over
//   in the host's memory               CheckpointOptions::keep_on_cpu
//   not at all                         where the region overwrites it: what was
//                                      there before is kept (outside.h)
//
// Threads: Get may run concurrently; the others need outside order.
#ifndef SHARDING_RECOMPUTE_CHECKPOINTED_KEPT_INPUTS_H_
#define SHARDING_RECOMPUTE_CHECKPOINTED_KEPT_INPUTS_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "ATen/core/Tensor.h"
#include "base/torch/placed_tensor.h"
#include "c10/core/Event.h"
#include "sharding/recompute/checkpointed/checkpoint_options.h"
#include "sharding/recompute/checkpointed/outside.h"
#include "sharding/recompute/checkpointed/tensor_copies.h"
#include "sharding/recompute/outside_tensor.h"

namespace tessera {

class KeptInputs {
 public:
  // `options` lives longer. LOCAL.
  KeptInputs(const CheckpointOptions& options,
             const std::vector<at::Tensor>& inputs, OperatorWatch* outer);

  bool Contains(const c10::StorageImpl* storage) const;
  // Gives up what lies in `storage`, for good.
  void Release(const c10::StorageImpl* storage);
  std::vector<at::Device> Devices() const;

  // As they were, at the edge of a new graph; what was released over its copy
  // among `redirects`. COLLECTIVE with partition_over. Throws libtorch's error
  // of a changed version, InvalidArgument naming the input and the ranks if
  // these had different ones.
  std::vector<at::Tensor> Get(Redirects* redirects) const;

 private:
  struct Input {
    explicit Input(const at::Tensor& tensor)
        : role(tensor), device(tensor.device()) {}
    GradRole role;
    at::Device device;
    std::optional<TensorPlace> layout;  // of what has a storage
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> storage;
    std::optional<OutsideTensor> value;  // whole, or the rank's part; or none
    std::optional<c10::Event> copied;    // to the host, as its span
    TensorPlace spanned;                 // what was copied so
    // With partition_over:
    bool partitioned = false;
    uint64_t print = 0;
  };

  at::Tensor Partition(const at::Tensor& tensor, Input* input) const;
  at::Tensor ToHost(const at::Tensor& tensor, Input* input) const;
  void Compare() const;
  at::Tensor Whole(const Input& input, const at::Tensor& part) const;

  const CheckpointOptions& options_;
  std::vector<std::optional<Input>> inputs_;  // nullopt: undefined
};

}  // namespace tessera
#endif  // SHARDING_RECOMPUTE_CHECKPOINTED_KEPT_INPUTS_H_
