// Visits the parts of a step's gradients that lie on this rank, parameter by
// parameter, for code that looks at gradients, or changes them, before the
// optimizer.
//
//   flat     [ w1 ..| b1 .| w2 ....|.. ]
//   shard           [ .. w2 part ..]       of each element one rank
//   owned    the shard; below stage 2 all of it
//
// Only parameters that have a gradient are visited. REQUIRES:
// FlatGradient::Raise, and has_step_gradient. LOCAL.
#ifndef OPTIM_GRADIENTS_OWNED_GRADIENTS_H_
#define OPTIM_GRADIENTS_OWNED_GRADIENTS_H_

#include <cstddef>
#include <cstdint>

#include "ATen/core/Tensor.h"
#include "ATen/ops/view_as_complex.h"
#include "base/layout/layout.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/gradient/flat_gradient.h"

namespace tessera {

// Calls visit(parameter, segment, first) for this rank's shard, also where it
// owns more: so each element counts on one rank. `segment`: [n], complex where
// the parameter is; `first`: where it begins, in elements from that of its
// storage.
template <typename Visit>
void VisitShard(const FlatParameter& flat, const FlatGradient& gradient,
                const Visit& visit) {
  const at::Tensor owned = gradient.owned();
  const Range shard = flat.layout().shard(flat.communicator()->rank());
  for (size_t i = 0; i < flat.parameters().size(); ++i) {
    const FlatParameter::Parameter& p = flat.parameters()[i];
    const Range mine = Intersect(p.range, shard);
    if (!gradient.has_gradient(i) || mine.empty()) continue;
    at::Tensor part =
        owned.narrow(0, mine.begin - flat.owned().begin, mine.numel());
    int64_t first = p.storage_offset + mine.begin - p.range.begin;
    if (p.tensor.is_complex()) {  // their parts stay together
      part = at::view_as_complex(part.view({-1, 2}));
      first /= 2;
    }
    visit(p, part, first);
  }
}

// Calls visit(parameter, segment) for all that this rank owns: the optimizer
// uses what it changes there. `segment`: [n], real.
template <typename Visit>
void VisitOwned(const FlatParameter& flat, const FlatGradient& gradient,
                const Visit& visit) {
  const at::Tensor owned = gradient.owned();
  for (size_t i = 0; i < flat.parameters().size(); ++i) {
    const FlatParameter::Parameter& p = flat.parameters()[i];
    const Range mine = Intersect(p.range, flat.owned());
    if (!gradient.has_gradient(i) || mine.empty()) continue;
    visit(p, owned.narrow(0, mine.begin - flat.owned().begin, mine.numel()));
  }
}

}  // namespace tessera
#endif  // OPTIM_GRADIENTS_OWNED_GRADIENTS_H_
