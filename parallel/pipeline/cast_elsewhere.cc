// Operators that are given parameters of other stages cast their inputs as
// operators of this stage do, where an engine's own fallback sees them
// (sharding/dispatch/tag.cc): all ranks run the same ones.
#include <optional>

#include "base/above/above_autograd.h"
#include "parallel/pipeline/staged_run.h"
#include "sharding/dispatch/autocast.h"
#include "sharding/dispatch/cast_inputs.h"
#include "sharding/dispatch/operator_info.h"
#include "sharding/dispatch/stack_tensors.h"

namespace tessera {
namespace {

bool IsElsewhere(const at::Tensor& tensor) {
  return StagedRun::Current()->IsElsewhere(tensor);
}

bool CastElsewhere(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack) {
  if (StagedRun::Current() == nullptr) return false;
  const OperatorInfo& info = OperatorInfo::Of(op);
  if (info.input_casts == InputCasts::kNone || AutocastTakes(keys)) {
    return false;
  }
  bool any = false;
  ForEachDefinedTensor(
      *stack, op.schema().arguments().size(),
      [&](const at::Tensor& t, size_t) { any = any || IsElsewhere(t); });
  if (!any) return false;
  const std::optional<at::ScalarType> result_dtype =
      CastInputs(op, info.input_casts, stack, &IsElsewhere);
  op.redispatchBoxed(BelowAbove(keys), stack);
  if (result_dtype) {
    CastFirstResult(op.schema().returns().size(), *result_dtype, stack);
  }
  return true;
}

[[maybe_unused]] const bool added = AddAboveHandler(&CastElsewhere, /*rank=*/1);

}  // namespace
}  // namespace tessera
