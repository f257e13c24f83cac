// KeptOperators: what a region keeps of operators that must not run again.
//
// For such an operator its results are kept, and for each tensor that autograd
// saved in it, which argument or result it was. When it comes again, these
// saved tensors are filled in and the kept results returned.
#ifndef SHARDING_RECOMPUTE_CHECKPOINTED_KEPT_OPERATORS_H_
#define SHARDING_RECOMPUTE_CHECKPOINTED_KEPT_OPERATORS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/core/stack.h"
#include "absl/container/flat_hash_map.h"
#include "sharding/dispatch/operator_info.h"
#include "sharding/recompute/checkpointed/checkpoint_options.h"
#include "sharding/recompute/checkpointed/tensor_copies.h"
#include "sharding/recompute/generator_state.h"
#include "sharding/recompute/outside_tensor.h"

namespace tessera {

// Returns whether `options` keep the operator's results; the same each time.
bool IsKept(const CheckpointOptions& options, const OperatorInfo& info);

struct KeptOperator {
  struct Result {
    c10::IValue other;  // what is no tensor, or undefined
    std::optional<GradRole> role;
    std::optional<OutsideTensor> value;
  };
  struct Saved {
    bool result;
    size_t index;  // among the tensors of the arguments, or the results
  };
  std::string name;
  // False: it has to run again.
  bool usable = false;
  std::vector<Result> results;
  std::vector<Saved> saved;
  std::optional<GeneratorStates> drawn_to;  // where it left the generators

  // Usable, and its results are as they were.
  bool is_there() const;
};

// Makes a region's KeptOperators while forward runs.
class KeptOperatorsBuilder {
 public:
  // Adds to `all`, which lives longer.
  KeptOperatorsBuilder(std::vector<KeptOperator>* all, OperatorWatch* outer)
      : all_(all), outer_(outer) {}

  void Begin(const OperatorInfo& info, const torch::jit::Stack& arguments);
  // Another operator begins: the last one may have thrown.
  void Abandon() { running_.reset(); }
  // Autograd saves a tensor.
  void Save(const at::Tensor& tensor);
  // `devices` are those of the region's generators.
  void End(const c10::OperatorHandle& op, const torch::jit::Stack& stack,
           const std::vector<at::Device>& devices);
  // A tensor that the region made is about to be written.
  void BeforeWrite(const c10::StorageImpl* storage);

 private:
  struct Running {
    KeptOperator op;
    std::vector<at::Tensor> arguments;
    std::vector<at::Tensor> saved;
  };
  void FindSaved(const std::vector<at::Tensor>& results);

  std::vector<KeptOperator>* const all_;
  OperatorWatch* const outer_;
  std::optional<Running> running_;
  struct Place {
    size_t op, result;
    at::Tensor tensor;
  };
  // Places of results that have not been written since.
  absl::flat_hash_map<const c10::StorageImpl*, std::vector<Place>> places_;
};

}  // namespace tessera
#endif  // SHARDING_RECOMPUTE_CHECKPOINTED_KEPT_OPERATORS_H_
