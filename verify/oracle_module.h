// Handles a rank's module as the oracle trains it: its parameters, and their
// dtypes.
#ifndef VERIFY_ORACLE_MODULE_H_
#define VERIFY_ORACLE_MODULE_H_

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"

namespace torch::nn {
class Module;
}

namespace tessera {

// Returns the parameters of `module` that have elements, each once, under its
// first name.
std::vector<std::pair<std::string, at::Tensor>> DistinctParameters(
    const torch::nn::Module& module);

// Converts parameters (with `keep_norms` except those of norms) and buffers
// that are real floating numbers to these dtypes, each in its place in its
// storage. Unset: they stay.
void ConvertModule(torch::nn::Module& module,
                   std::optional<at::ScalarType> dtype, bool keep_norms,
                   std::optional<at::ScalarType> buffer_dtype);

}  // namespace tessera
#endif  // VERIFY_ORACLE_MODULE_H_
