// TensorParts: a module's parameters that are divided over the ranks of a
// tensor-parallel group, or copies on the ranks of a sequence-parallel one,
// from Engine::Create to Close.
//
//   module     q.weight [8, 4], placed (parallel/tensor/placed.h)
//                 |
//   part       [4, 4], rows 4 to 7 on rank 1: the engine's parameter, which is
//              sharded again over the ranks that have the same part
#ifndef ENGINE_DIVIDE_TENSOR_PARTS_H_
#define ENGINE_DIVIDE_TENSOR_PARTS_H_

#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "comm/communicator.h"
#include "engine/api/engine_types.h"
#include "engine/build/settings.h"
#include "optim/states/parameter_groups.h"
#include "parallel/tensor/placed.h"
#include "sharding/partition/partition.h"

namespace torch::nn {
class Module;
}

namespace tessera {

// Chooses what is divided, of all that the configuration and the program say.
// InvalidArgument: nothing says it. Unimplemented: an optimizer or clipping
// that needs whole parameters. Errors of TensorPlanOf and FindTensorPlan
// (parallel/plan/tensor_plan.h), by which it is read and found. LOCAL.
absl::StatusOr<std::vector<TensorCut>> ChooseTensorCuts(
    const proto::Config& config, const Settings& settings,
    const ParameterGroups& groups, const EngineOptions& options,
    const torch::nn::Module& module);

class TensorParts {
 public:
  // Places the parameters of `units` that `cuts` names: each one's tensor in
  // `units` becomes this rank's part, and the rest of its memory is given back.
  // InvalidArgument: there is no such parameter, no such dimension, `ranks` do
  // not divide it, or it shares memory with another; nothing is changed then.
  // ResourceExhausted. LOCAL, and equal on ranks with equal arguments.
  absl::Status Divide(const std::vector<TensorCut>& cuts,
                      const std::shared_ptr<Communicator>& ranks,
                      std::vector<UnitPlan>* units);
  // Makes all parameters of `units` copies (TensorPlacement::kCopy): what is
  // computed with them and with parts of sequences has an addend of its
  // gradient on each of `ranks`. Unimplemented: SyncBatchNorm. LOCAL.
  absl::Status Copy(const torch::nn::Module& module,
                    const std::shared_ptr<Communicator>& ranks,
                    std::vector<UnitPlan>* units);
  // Has the module's own tensors follow the dtypes of the engine's. LOCAL.
  void RenewDtypes() const;
  // The group of Divide or Copy; null: neither was called.
  const std::shared_ptr<PartGroup>& group() const { return group_; }
  // Makes them whole, in plain memory. COLLECTIVE. ResourceExhausted.
  absl::Status GiveBack();
  bool empty() const { return placed_.empty(); }

 private:
  void PlaceOne(const TensorPlacement& placement, at::Tensor part,
                NamedParameter* parameter);

  std::shared_ptr<PartGroup> group_;
  std::vector<at::Tensor> placed_;  // the module's own
};

}  // namespace tessera
#endif  // ENGINE_DIVIDE_TENSOR_PARTS_H_
