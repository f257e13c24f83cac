// Partition: divides a module's parameters into units.
//
// A unit has the parameters of one module that no unit below it takes;
// parameters that no module takes become units of contiguous runs of
// registration. The modules are:
//   leaves     those of `leaf_classes` and `is_leaf`, the outermost. A leaf is
//              one unit whatever its size: nothing in it makes another.
//   wanted     those of `unit_classes` and `is_unit`, all of them: the outer of
//              two nested ones holds the rest, as in PyTorch's FSDP.
//   automatic  where none are wanted: the outermost type of module that is the
//              user's own and occurs at least twice (a transformer block, say),
//              its outermost instances; one of torch's types if no other does.
//              Outermost: none of its instances lies in one of another such
//              type, as norms lie in blocks; of several, the least deep.
// Units have at most `max_unit_numel` elements, except leaves and what is
// larger by itself; others are cut between parameters.
//
// Parameters of one storage are together, in the unit of the first of them, and
// count there as one.
#ifndef SHARDING_PARTITION_PARTITION_H_
#define SHARDING_PARTITION_PARTITION_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "sharding/partition/named_parameter.h"

namespace torch::nn {
class Module;
}

namespace tessera {

// `path` is that of named_modules(): "layers.3", "" for the root.
using ModulePredicate = std::function<bool(const torch::nn::Module& module,
                                           absl::string_view path)>;

// Classes go by Module::name() in full, or by its last component, with or
// without "Impl": "torch::nn::LinearImpl", "LinearImpl" and "Linear" are one.
struct PartitionOptions {
  int64_t max_unit_numel = 50'000'000;  // >= 1
  std::vector<std::string> unit_classes;
  ModulePredicate is_unit;
  std::vector<std::string> leaf_classes;
  ModulePredicate is_leaf;
  // Names of parameters, or of modules with all that is in them, that are in no
  // unit; a tied one by any of its names. '*' stands for any characters (dots
  // too), '?' for one.
  std::vector<std::string> ignored;
  // Modules whose parameters get keep_fp32: torch's norms that learn
  // (LayerNorm, GroupNorm, BatchNorm1d to 3d, InstanceNorm1d to 3d), others by
  // class.
  bool keep_norms_fp32 = false;
  std::vector<std::string> fp32_classes;
};

struct UnitPlan {
  // The module's name; or the name of the unit's first parameter, for a run,
  // the root, and a piece that is not the module's first. Names are unique.
  std::string name;
  std::vector<NamedParameter> parameters;  // in order of registration
};

struct Partition {
  std::vector<UnitPlan> units;  // in order of their first parameters
  std::vector<NamedParameter> ignored;
};

// Puts every parameter of the module into one unit (tied ones under their first
// name). Parameters without elements are left out. LOCAL, with identical
// results on ranks that built the same module, whatever requires a gradient
// there. O(n log n) of modules and parameters, times patterns with wildcards in
// `ignored`.
//
// InvalidArgument names
// - a class or an `ignored` name that matches nothing, with what there is;
// - a parameter that cannot be sharded: it is not strided and dense, is on
//   another device than the first or on meta, is no leaf of autograd, an
//   inference tensor, has a negative or conjugate bit, or requires a gradient
//   in another dtype than float16, bfloat16, float32, float64, complex64 and
//   complex128;
// - two parameters of one storage that overlap, differ in dtype, or of which
//   one is ignored.
absl::StatusOr<Partition> PlanUnits(const torch::nn::Module& module,
                                    const PartitionOptions& options);

}  // namespace tessera
#endif  // SHARDING_PARTITION_PARTITION_H_
