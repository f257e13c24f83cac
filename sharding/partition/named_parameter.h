// NamedParameter: a parameter of a module, and what a plan says about it.
#ifndef SHARDING_PARTITION_NAMED_PARAMETER_H_
#define SHARDING_PARTITION_NAMED_PARAMETER_H_

#include <string>

#include "ATen/core/Tensor.h"

namespace tessera {

struct NamedParameter {
  std::string name;   // the first of named_parameters()
  at::Tensor tensor;  // the module's own
  // Its index in the order of registration, among the parameters of all units.
  int index = 0;
  // Its module computes in float32 where others compute in 16 bits.
  bool keep_fp32 = false;
  // Its unit's name, set by SplitFlats: a flat of small parameters may have
  // several units.
  std::string unit;
};

}  // namespace tessera
#endif  // SHARDING_PARTITION_NAMED_PARAMETER_H_
