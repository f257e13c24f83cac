// What ranks have of their own in a checkpoint, by its names
// (docs/checkpoint_format.md).
#ifndef ENGINE_CHECKPOINT_OWN_VALUES_H_
#define ENGINE_CHECKPOINT_OWN_VALUES_H_

#include <string>
#include <vector>

#include "ATen/core/Generator.h"
#include "ATen/core/Tensor.h"

namespace tessera {

inline constexpr char kClientState[] = "client_state";
// Before the name of a tensor that is not sharded.
inline constexpr char kOwnTensor[] = "tensor/";

struct NamedGenerator {
  std::string name;
  at::Generator generator;
};

// That of the CPU, and that of `device`.
std::vector<NamedGenerator> GeneratorsOf(at::Device device);

// A generator's state, of the bytes of one.
at::Tensor GeneratorState(const std::string& bytes);

}  // namespace tessera
#endif  // ENGINE_CHECKPOINT_OWN_VALUES_H_
