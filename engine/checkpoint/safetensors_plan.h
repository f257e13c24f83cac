// Matches the tensors of a safetensors file with the parameters and buffers of
// a module.
#ifndef ENGINE_CHECKPOINT_SAFETENSORS_PLAN_H_
#define ENGINE_CHECKPOINT_SAFETENSORS_PLAN_H_

#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "checkpoint/safetensors.h"
#include "engine/api/engine_types.h"

namespace tessera {

// A parameter or buffer that the file has.
struct SafetensorsMatch {
  std::string name;  // the module's first
  at::Tensor tensor;
  const SafetensorsTensor* source;  // the file's
  bool transposed = false;          // there
};

// Two tensors of the file that are one in the module.
struct SafetensorsTie {
  const SafetensorsTensor* used;
  const SafetensorsTensor* other;
};

struct SafetensorsPlan {
  std::vector<SafetensorsMatch> matches;  // parameters, then buffers
  std::vector<SafetensorsTie> ties;       // with the same dtype and sizes
  std::vector<std::string> notes;         // of ties that differ, for the log
  // First names of what the file lacks; names of the file that match nothing.
  std::vector<std::string> missing, unexpected;
};

// Returns OK where the two have the same bits in part `part` of `parts`; else
// InvalidArgument with both names. LOCAL.
absl::Status CompareTie(const Safetensors& file, const SafetensorsTie& tie,
                        int part, int parts);

// Matches names; checks sizes and kinds of dtypes. InvalidArgument lists all
// that is missing or unexpected (where `options` are strict) or does not fit.
// LOCAL.
absl::StatusOr<SafetensorsPlan> PlanSafetensors(
    const torch::nn::Module& module, const Safetensors& file,
    const LoadSafetensorsOptions& options);

// Returns text that is equal where plans are: counts, and a fingerprint of
// names, sizes and dtypes.
std::string PrintOf(const SafetensorsPlan& plan);

}  // namespace tessera
#endif  // ENGINE_CHECKPOINT_SAFETENSORS_PLAN_H_
