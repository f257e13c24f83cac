// Applies overrides of single keys ("zero_optimization.stage=1", as --set and
// LoadConfig take them) to a configuration's JSON before it is read.
#ifndef CONFIG_READER_OVERRIDES_H_
#define CONFIG_READER_OVERRIDES_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "config/reader/json_reader.h"
#include "google/protobuf/descriptor.h"

namespace tessera {

// Sets each "KEY=VALUE" in `root`, in order. KEY is the dotted path of a key;
// objects that are absent are made. VALUE is JSON, or else a string without
// quotes. The key replaces the one that is there, under any of its names in
// `schema`. Positions of what is set are kOverride (config/reader/
// json_reader.h). Returns InvalidArgument if there is no KEY or no '=', if
// VALUE begins as an array, an object or a string and is none, and if KEY leads
// through a value that is no object. Pure.
absl::Status ApplyOverrides(const std::vector<std::string>& overrides,
                            const google::protobuf::Descriptor& schema,
                            JsonValue* root);

// Adds the keys of a TrainingConfig (config/training_config.h), in the same
// form. Positions are kInCode. Returns InvalidArgument if a key is there
// already, and as above. Pure.
absl::Status AddInCode(const std::vector<std::string>& keys,
                       const google::protobuf::Descriptor& schema,
                       JsonValue* root);

}  // namespace tessera
#endif  // CONFIG_READER_OVERRIDES_H_
