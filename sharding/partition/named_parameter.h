// NamedParameter: a parameter of a module, and what a plan says of it.
#ifndef SHARDING_PARTITION_NAMED_PARAMETER_H_
#define SHARDING_PARTITION_NAMED_PARAMETER_H_

#include <string>

#include "ATen/core/Tensor.h"

namespace tessera {

struct NamedParameter {
  std::string name;   // the first of named_parameters()
  at::Tensor tensor;  // the module's own
  // Its place in the order of registration, among the parameters of all units.
  int index = 0;
  // Its module was asked to compute in float32 where others do in 16 bits.
  bool keep_fp32 = false;
  // Its unit's name, from SplitFlats on: a flat of small ones has several.
  std::string unit;
};

}  // namespace tessera
#endif  // SHARDING_PARTITION_NAMED_PARAMETER_H_
