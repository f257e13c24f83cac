// NamedAccess: reads and sets one parameter at a time, by name, whole: its
// values, master, gradient and optimizer states. engine/engine.h documents the
// calls that Engine has under the same name.
//
// A read gathers what the ranks own; a Set writes this rank's part of a value
// that all ranks pass. Masters are read and set within an ExclusiveScope;
// gradients and optimizer states are used only by their owner, so they need
// none.
#ifndef ENGINE_VALUES_NAMED_ACCESS_H_
#define ENGINE_VALUES_NAMED_ACCESS_H_

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/model/optimization.h"
#include "engine/model/update_guard.h"

namespace tessera {

class NamedAccess {
 public:
  // `guard` and `optimization` outlive this.
  NamedAccess(UpdateGuard* guard, Optimization* optimization)
      : guard_(guard), optimization_(*optimization) {}

  absl::StatusOr<at::Tensor> Parameter(absl::string_view name);
  absl::StatusOr<at::Tensor> Master(absl::string_view name);
  absl::StatusOr<at::Tensor> Gradient(absl::string_view name);
  absl::StatusOr<at::Tensor> State(absl::string_view name,
                                   absl::string_view state);

  absl::Status SetMaster(absl::string_view name, const at::Tensor& value);
  absl::Status SetGradient(absl::string_view name, const at::Tensor& value);
  absl::Status SetState(absl::string_view name, absl::string_view state,
                        const at::Tensor& value);

 private:
  // As ShardedModel::Find; FailedPrecondition where the engine is not open.
  absl::StatusOr<ParameterRef> Find(absl::string_view name) const;
  const FlatParameter::Parameter& ParameterAt(const ParameterRef& place) const;
  // Announces an error of this rank, since the other ranks may be in a
  // collective that this rank did not reach.
  absl::StatusOr<at::Tensor> Announced(absl::StatusOr<at::Tensor> result);
  absl::StatusOr<at::Tensor> WholeCopy(const ParameterRef& place,
                                       const at::Tensor& owned,
                                       absl::string_view what) const;
  // Finds the parameter and checks that all ranks have it, and that `value`
  // fits and is identical on all; a state may have a shape of its own.
  // COLLECTIVE.
  absl::StatusOr<ParameterRef> AgreeOnValue(absl::string_view name,
                                            const at::Tensor& value,
                                            absl::string_view where,
                                            absl::string_view state = "");
  // Returns a state with a shape of its own, which each rank has whole;
  // undefined: the state has the parameter's shape, or does not exist.
  at::Tensor ShapedState(const ParameterRef& place,
                         absl::string_view state) const;
  // This rank's part of a state, [owned].
  struct Owned {
    TieredBuffer* buffer;
    bool non_negative;
  };
  absl::StatusOr<Owned> OwnedState(absl::string_view name,
                                   const ParameterRef& place,
                                   absl::string_view state);
  // Writes this rank's part of `value`, a whole one, to `state`. REQUIRES: the
  // state is in memory or raised.
  absl::Status WriteState(const ParameterRef& place, const at::Tensor& value,
                          const Owned& state);

  UpdateGuard* const guard_;
  Optimization& optimization_;
};

}  // namespace tessera
#endif  // ENGINE_VALUES_NAMED_ACCESS_H_
