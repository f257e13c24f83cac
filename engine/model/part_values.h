// Values of parameters that are divided over a tensor-parallel group, or are at
// one stage of a pipeline: whole from this rank's part, and the part from the
// whole.
#ifndef ENGINE_MODEL_PART_VALUES_H_
#define ENGINE_MODEL_PART_VALUES_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "engine/model/sharded_model.h"

namespace tessera {

// Returns Unimplemented if layers are divided, since `call` cannot do with it.
// LOCAL.
absl::Status CheckWhole(const ShardedModel& model, absl::string_view call);

// Checks that the ranks of the tensor- or sequence-parallel group have the same loss and
// weight: InvalidArgument with both, since other samples, or other random
// numbers, would train something else in silence. COLLECTIVE over the group, if
// there is one; waits for a device.
absl::Status CheckSameLoss(const ShardedModel& model, const at::Tensor& loss,
                           std::optional<double> weight);

// Warns if sequences may be divided and a forward has divided none. LOCAL.
void WarnIfWhole(const ShardedModel& model);

// Returns the sizes of the whole parameter.
std::vector<int64_t> WholeSizes(const FlatParameter::Parameter& parameter);
// Returns the whole of which each rank of the group has `part`, a value of the
// parameter's sizes and any dtype; `part` itself where it is not divided. Of a
// pipeline it is its home's value, which may be undefined.
// COLLECTIVE over the group. ResourceExhausted.
absl::StatusOr<at::Tensor> JoinParts(const ShardedModel& model,
                                     const FlatParameter::Parameter& parameter,
                                     const at::Tensor& part);
// Returns this rank's part of `whole`, perhaps a view of it. LOCAL.
at::Tensor PartIn(const at::Tensor& whole,
                  const FlatParameter::Parameter& parameter);

}  // namespace tessera
#endif  // ENGINE_MODEL_PART_VALUES_H_
