// Makes whole parameters, gradients or optimizer states from buffers of which
// every rank holds its part of a flat, and writes them back.
#ifndef SHARDING_FLAT_WHOLE_VALUES_H_
#define SHARDING_FLAT_WHOLE_VALUES_H_

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/layout/flat_buffer.h"
#include "sharding/copy/flat_description.h"

namespace tessera {

// Gathers all ranks' `owned` into one buffer, [P]. `owned`: [flat.owned()], of
// any dtype. `what` names it in messages: "masters". COLLECTIVE where the
// flat's optimizer is sharded. ResourceExhausted.
absl::StatusOr<FlatBuffer> GatherWhole(const FlatDescription& flat,
                                       const at::Tensor& owned,
                                       absl::string_view what);

// Returns a view of the parameter's place in a flat buffer [P], in its own
// shape; complex where the parameter is. LOCAL.
at::Tensor PlaceIn(const FlatBuffer& buffer, const FlatDescription& flat,
                   int parameter);

// Writes this rank's part of `value`, which has the parameter's sizes, to
// `owned`. LOCAL. ResourceExhausted.
absl::Status WriteOwned(const FlatDescription& flat, int parameter,
                        const at::Tensor& value, at::Tensor owned);

}  // namespace tessera
#endif  // SHARDING_FLAT_WHOLE_VALUES_H_
