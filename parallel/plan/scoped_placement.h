// ScopedPlacement: makes a parameter a placed one for its life, as PlaceInPlace
// does (parallel/tensor/placed.h), but leaves its memory and its gradient
// alone. Afterwards it has no gradient accumulator.
#ifndef PARALLEL_PLAN_SCOPED_PLACEMENT_H_
#define PARALLEL_PLAN_SCOPED_PLACEMENT_H_

#include <cstdint>
#include <memory>

#include "ATen/core/Tensor.h"
#include "parallel/tensor/part_group.h"
#include "parallel/tensor/placed.h"

namespace tessera {

class ScopedPlacement {
 public:
  ScopedPlacement(at::Tensor parameter, at::Tensor part,
                  const TensorPlacement& placement,
                  std::shared_ptr<PartGroup> group);
  ~ScopedPlacement();
  ScopedPlacement(const ScopedPlacement&) = delete;
  ScopedPlacement& operator=(const ScopedPlacement&) = delete;

 private:
  const at::Tensor parameter_;
};

}  // namespace tessera
#endif  // PARALLEL_PLAN_SCOPED_PLACEMENT_H_
