// NamedAccess: one parameter at a time, by name, whole: its values, master,
// gradient and optimizer states, read and set. What each call does and returns
// is said with Engine's of the same name (engine/engine.h).
//
// A read gathers what the ranks own; a Set writes this rank's part of a value
// that all ranks bring. Masters are read and set within an ExclusiveScope;
// gradients and optimizer states are nobody's but the owner's, so no other rank
// can be in the way.
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
  // As ShardedModel's; FailedPrecondition where the engine is not open.
  absl::StatusOr<ParameterRef> Find(absl::string_view name) const;
  // The others may be in the collective that this rank did not come to.
  absl::StatusOr<at::Tensor> Announced(absl::StatusOr<at::Tensor> result);
  absl::StatusOr<at::Tensor> WholeCopy(const ParameterRef& place,
                                       const at::Tensor& owned,
                                       absl::string_view what) const;
  // Where the parameter is: that all ranks know it, that `value` fits it, and
  // is the same on all; a state's shape may be its own. COLLECTIVE.
  absl::StatusOr<ParameterRef> AgreeOnValue(absl::string_view name,
                                            const at::Tensor& value,
                                            absl::string_view where,
                                            absl::string_view state = "");
  // One with a shape of its own, which each rank has whole; undefined: it is no
  // such, or is not there.
  at::Tensor ShapedState(const ParameterRef& place,
                         absl::string_view state) const;
  // This rank's part of one state, [owned]; the others have theirs.
  struct Owned {
    TieredBuffer* buffer;
    bool non_negative;
  };
  absl::StatusOr<Owned> OwnedState(absl::string_view name,
                                   const ParameterRef& place,
                                   absl::string_view state);
  // Into it. REQUIRES: it is in memory or raised.
  absl::Status WriteState(const ParameterRef& place, const at::Tensor& value,
                          const Owned& state);

  UpdateGuard* const guard_;
  Optimization& optimization_;
};

}  // namespace tessera
#endif  // ENGINE_VALUES_NAMED_ACCESS_H_
