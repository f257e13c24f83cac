// Groups of parameters as the oracle reads them: which parameter is stepped
// with which options. The rules of optimizer.param_groups and
// optimizer.no_decay (config/optimizer.proto), followed anew.
#ifndef VERIFY_ORACLE_GROUPS_H_
#define VERIFY_ORACLE_GROUPS_H_

#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/strings/string_view.h"
#include "verify/oracle_step.h"

namespace torch::nn {
class Module;
}

namespace tessera {

struct OracleGroup {
  std::string name;
  OracleStepOptions options;
  bool frozen = false;  // from the beginning on: they need no gradient
  // Whose names fit one of these: '*' is any characters, '?' one.
  std::vector<std::string> parameters;
  // Whose module is of one of these classes, by its whole name or what follows
  // the last "::", "Impl" at the end or not.
  std::vector<std::string> modules;
  // Of which the program says so.
  std::function<bool(const torch::nn::Module& module, absl::string_view name,
                     const at::Tensor& tensor)>
      claims;
  // Biases, and parameters of norms and embeddings: what has "bias" at one end
  // of its last name, or whose class has Norm or Embedding in its last name.
  bool undecayed = false;
  // Real parameters of two dims or more, of no embedding and with neither
  // "embed" nor "head" in their names.
  bool hidden_matrices = false;
  // In place of OracleOptions::max_norm, of the norm of these alone.
  std::optional<double> max_norm;
  std::optional<double> adaptive;  // in place of OracleOptions::adaptive
};

bool FitsPattern(absl::string_view pattern, absl::string_view name);
bool FitsClass(absl::string_view wanted, absl::string_view class_name);

// Of each parameter that is in a group the number of that: the first that has
// it under any of its names.
std::map<const at::TensorImpl*, size_t> OracleGroupsOf(
    const torch::nn::Module& module, const std::vector<OracleGroup>& groups);

// Sets an option by the name that torch::optim has for it ("lr", "beta1"; a
// flag is 0 or 1). False: there is none such.
bool SetOracleOption(absl::string_view name, double value,
                     OracleStepOptions* options);

}  // namespace tessera
#endif  // VERIFY_ORACLE_GROUPS_H_
