// What a field of the section optimizer.params is where it is not set: it
// depends on the optimizer (optim/algorithms).
#ifndef CONFIG_OPTIONS_OPTION_DEFAULTS_H_
#define CONFIG_OPTIONS_OPTION_DEFAULTS_H_

#include <string>

#include "google/protobuf/descriptor.h"

namespace tessera {

// Returns "0.001 (Adam, AdamW), 0.01 (Adagrad)".
std::string DefaultsOfOptimizers(
    const google::protobuf::FieldDescriptor& field);

}  // namespace tessera
#endif  // CONFIG_OPTIONS_OPTION_DEFAULTS_H_
