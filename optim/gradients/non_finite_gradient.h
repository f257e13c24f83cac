// The report of a step about a gradient that is not finite.
#ifndef OPTIM_GRADIENTS_NON_FINITE_GRADIENT_H_
#define OPTIM_GRADIENTS_NON_FINITE_GRADIENT_H_

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

// A parameter whose reduced gradient is not finite.
struct NonFiniteGradient {
  std::string parameter, unit;
  // Elements over all ranks, each counted once; a complex one as NaN if one of
  // its parts is, else as infinite.
  int64_t nan_numel = 0;
  int64_t infinite_numel = 0;
  // The ranks whose shards have such elements, as the unit is cut at stages 1
  // to 3, even if each rank has all of it; the first of replicas.
  std::vector<int> ranks;
};

}  // namespace tessera
#endif  // OPTIM_GRADIENTS_NON_FINITE_GRADIENT_H_
