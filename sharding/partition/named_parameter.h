// NamedParameter: a parameter of a module, and what a plan says about it.
#ifndef SHARDING_PARTITION_NAMED_PARAMETER_H_
#define SHARDING_PARTITION_NAMED_PARAMETER_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"

namespace tessera {

// Which part of a parameter a rank has: of those of a tensor-parallel group, or
// of a pipeline, where one has all of it and the others nothing.
struct PartOfWhole {
  std::vector<int64_t> sizes;  // of the whole
  int64_t dim = 0;             // along which it is cut into equal parts
  int64_t groups = 1;          // of that dimension, each of which is cut
  int index = 0, parts = 1;    // this one's place, and how many there are
  // The place in a pipeline that has all of it; the others have a stand-in of
  // one element, which is nobody's. -1: it is cut.
  int home = -1;
  std::vector<int64_t> strides;  // of a pipeline: the whole's
  at::Tensor whole;              // of a pipeline: the module's own tensor

  bool of_pipeline() const { return home >= 0; }
  bool stands_in() const { return home >= 0 && home != index; }
  int64_t WholeNumel() const {
    int64_t numel = 1;
    for (const int64_t size : sizes) numel *= size;
    return numel;
  }

  // Returns the same part with a dimension for the groups before the cut one.
  PartOfWhole Split() const {
    if (groups == 1) return *this;
    PartOfWhole split = *this;
    const auto at = split.sizes.begin() + dim;
    *at /= groups;
    split.sizes.insert(at, groups);
    ++split.dim;
    split.groups = 1;
    return split;
  }
};

struct NamedParameter {
  std::string name;   // the first of named_parameters()
  at::Tensor tensor;  // the module's own; of a divided one this rank's part
  // Its index in the order of registration, among the parameters of all units.
  int index = 0;
  // Its module computes in float32 where others compute in 16 bits.
  bool keep_fp32 = false;
  // Its unit's name, set by SplitFlats: a flat of small parameters may have
  // several units.
  std::string unit;
  // Absent: each rank has the whole.
  std::optional<PartOfWhole> part;
  // Other ranks have the same elements and count them in norms, or it stands in
  // for what they have.
  bool counted_elsewhere = false;
};

}  // namespace tessera
#endif  // SHARDING_PARTITION_NAMED_PARAMETER_H_
