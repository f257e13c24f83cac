// Whole parameters, and what belongs to them (gradients, optimizer states), out
// of buffers of which every rank holds its part of a unit, and back.
#ifndef SHARDING_WHOLE_VALUES_H_
#define SHARDING_WHOLE_VALUES_H_

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "sharding/flat_buffer.h"
#include "sharding/unit.h"

namespace tessera {

// All ranks' `owned` together, [P]. `owned`: [unit.owned()], of any dtype.
// `what` names it in messages: "masters". COLLECTIVE where the unit's optimizer
// is sharded. ResourceExhausted.
absl::StatusOr<FlatBuffer> GatherWhole(const Unit& unit,
                                       const at::Tensor& owned,
                                       absl::string_view what);

// The parameter's place in a flat buffer [P], in its own shape; complex where
// the parameter is. Not a copy. LOCAL.
at::Tensor PlaceIn(const FlatBuffer& flat, const Unit& unit, int parameter);

// Writes this rank's part of `value`, which has the parameter's sizes, to
// `owned`. LOCAL. ResourceExhausted.
absl::Status WriteOwned(const Unit& unit, int parameter,
                        const at::Tensor& value, at::Tensor owned);

}  // namespace tessera
#endif  // SHARDING_WHOLE_VALUES_H_
