// FlatPlan: the flat buffers of each unit (sharding/partition/partition.h).
// Parameters of a unit share a flat if they agree in dtype, in the dtype that
// the model computes with, in whether they are trained and in whether they
// persist.
//
//   unit     block0: w (16 bit), norm (float32), frozen
//   flats    block0 [w]   block0 (float32) [norm]   block0 (frozen) [frozen]
//
// Small parameters may persist, that is, stay whole where the others are
// sharded (DeepSpeed's stage3_param_persistence_threshold).
#ifndef SHARDING_PARTITION_FLAT_PLAN_H_
#define SHARDING_PARTITION_FLAT_PLAN_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "sharding/partition/named_parameter.h"
#include "sharding/partition/partition.h"

namespace tessera {

// Persistent parameters of consecutive units share flats of at most so many
// elements (or of one larger parameter): where all parameters are small, their
// gradients are reduced in parts, while the backward goes on.
inline constexpr int64_t kMaxPersistentFlatNumel = 1 << 18;

struct FlatOptions {
  bool sharded_parameters = false;  // stage 3; else nothing persists
  // Parameters of at most so many elements persist, the first ones in order of
  // registration that together have at most model_persistence_threshold.
  int64_t persistence_threshold = 0;
  int64_t model_persistence_threshold = std::numeric_limits<int64_t>::max();
  // Returns the dtype that the model computes with; null: the parameter's own.
  std::function<at::ScalarType(const NamedParameter&)> working_dtype;
  // Returns a number: parameters with different numbers lie in different flats
  // (an optimizer keeps different states for them). Null: all have the same.
  std::function<int(const NamedParameter&)> part;
};

struct FlatPlan {
  std::string unit;  // the unit of its first parameter
  // The unit's name, with " (frozen)" or " (float64)" (the working dtype) where
  // other flats of the unit differ in that. What is too small to be sharded
  // (stage3_param_persistence_threshold) has " (kept whole)", after " and other
  // small parameters" if some are of other units. Names are unique.
  std::string name;
  std::vector<NamedParameter> parameters;  // in order of registration
  at::ScalarType dtype = at::kFloat;       // of the parameters now
  at::ScalarType working_dtype = at::kFloat;
  bool trainable = true;
  bool persistent = false;
};

// Makes the flats of all units, in order of registration of their first
// parameters. Parameters of one storage are in one flat, which is trained if
// one of them is; they persist together or not at all. `trainable[i]` belongs
// to the parameter with index i and must be identical on all ranks.
// InvalidArgument names two parameters of one storage that differ in working
// dtype or part. LOCAL, O(parameters). REQUIRES: `units` of PlanUnits, one
// entry of `trainable` per parameter.
absl::StatusOr<std::vector<FlatPlan>> SplitFlats(
    absl::Span<const UnitPlan> units, const std::vector<bool>& trainable,
    const FlatOptions& options);

}  // namespace tessera
#endif  // SHARDING_PARTITION_FLAT_PLAN_H_
