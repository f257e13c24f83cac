// Names and values of what each rank has of its own in a checkpoint
// (docs/checkpoint_format.md).
#ifndef ENGINE_CHECKPOINT_OWN_VALUES_H_
#define ENGINE_CHECKPOINT_OWN_VALUES_H_

#include <string>
#include <vector>

#include "ATen/core/Generator.h"
#include "ATen/core/Tensor.h"

namespace tessera {

inline constexpr char kClientState[] = "client_state";
// Prefix of the names of tensors that are not sharded.
inline constexpr char kOwnTensor[] = "tensor/";

struct NamedGenerator {
  std::string name;
  at::Generator generator;
};

// Returns the generators of the CPU and of `device`.
std::vector<NamedGenerator> GeneratorsOf(at::Device device);

// Makes a generator's state from its bytes.
at::Tensor GeneratorState(const std::string& bytes);

}  // namespace tessera
#endif  // ENGINE_CHECKPOINT_OWN_VALUES_H_
