// Decides which options the oracle steps each parameter with. It implements the
// rules of optimizer.param_groups and optimizer.no_decay
// (config/optimizer.proto) independently.
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
  // Patterns of parameter names: '*' is any characters, '?' one.
  std::vector<std::string> parameters;
  // Classes of modules whose parameters belong to the group, by the whole name
  // or what follows the last "::", with or without "Impl" at the end.
  std::vector<std::string> modules;
  // Returns whether the program puts a parameter in the group.
  std::function<bool(const torch::nn::Module& module, absl::string_view name,
                     const at::Tensor& tensor)>
      claims;
  // Whether biases and parameters of norms and embeddings belong: those with
  // "bias" at one end of their last name, or whose class has Norm or Embedding
  // in its last name.
  bool undecayed = false;
  // Whether real parameters of two dims or more belong that are in no embedding
  // and have neither "embed" nor "head" in their names.
  bool hidden_matrices = false;
  // Replaces OracleOptions::max_norm, for the norm of these parameters alone.
  std::optional<double> max_norm;
  std::optional<double> adaptive;  // replaces OracleOptions::adaptive
};

bool FitsPattern(absl::string_view pattern, absl::string_view name);
bool FitsClass(absl::string_view wanted, absl::string_view class_name);

// Returns, for each parameter that is in a group, the index of the first group
// that has it under any of its names.
std::map<const at::TensorImpl*, size_t> OracleGroupsOf(
    const torch::nn::Module& module, const std::vector<OracleGroup>& groups);

// Sets an option by the name that torch::optim has for it ("lr", "beta1"; a
// flag is 0 or 1). Returns false if there is no such option.
bool SetOracleOption(absl::string_view name, double value,
                     OracleStepOptions* options);

}  // namespace tessera
#endif  // VERIFY_ORACLE_GROUPS_H_
