// Operators that are given parameters, as an engine sees them
// (sharding/dispatch/tag.cc): when they begin is told to the trace, errors name
// them, and inputs follow the parameters' dtype
// (sharding/dispatch/cast_inputs.h).
//
// Why a key above autograd and autocast: operators that are made of others end
// there, gradients have to flow through the casts, and autocast comes first.
// The engine's own key for that is excluded while a trace is taken, since
// parameters are not the engine's.
#include <optional>

#include "base/above/above_autograd.h"
#include "base/torch_guard.h"
#include "c10/core/impl/LocalDispatchKeySet.h"
#include "sharding/dispatch/autocast.h"
#include "sharding/dispatch/cast_inputs.h"
#include "sharding/dispatch/operator_info.h"
#include "sharding/dispatch/stack_tensors.h"
#include "sharding/trace/tracer.h"

namespace tessera {
namespace {

bool IsParameter(const at::Tensor& t) {
  return Tracer::Current() != nullptr && Tracer::Current()->IsParameter(t);
}

// Whether it is given any.
bool Begin(const torch::jit::Stack& stack, size_t n) {
  bool any = false;
  ForEachDefinedTensor(stack, n, [&](const at::Tensor& t, size_t) {
    if (!IsParameter(t)) return;
    any = true;
    Tracer::Current()->Begin(t);
  });
  return any;
}

// As the tag's fallback: nothing is seen below an operator of libtorch's own
// that was given a parameter.
bool KeepGiven(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
               torch::jit::Stack* stack) {
  const OperatorInfo& info = OperatorInfo::Of(op);
  const c10::DispatchKeySet below = BelowAbove(keys);
  if (info.kind != OperatorInfo::Kind::kCompute ||
      !Begin(*stack, op.schema().arguments().size())) {
    return false;
  }
  std::optional<at::ScalarType> result_dtype;
  if (Tracer::Current()->casts_inputs() &&
      info.input_casts != InputCasts::kNone && !AutocastTakes(keys)) {
    result_dtype = CastInputs(op, info.input_casts, stack, &IsParameter);
  }
  std::optional<c10::impl::ExcludeDispatchKeyGuard> exclude;
  if (info.aten && !AutocastIsOn()) {
    exclude.emplace(c10::DispatchKeySet(kAboveKey));
  }
  ThrowIfError(CatchTorch(Tracer::Current()->Where(info.name),
                          [&] { op.redispatchBoxed(below, stack); }));
  if (result_dtype) {
    CastFirstResult(op.schema().returns().size(), *result_dtype, stack);
  }
  return true;
}

[[maybe_unused]] const bool added = AddAboveHandler(&KeepGiven, /*rank=*/0);

}  // namespace
}  // namespace tessera
