// What a configuration may say, but this version's engine does not do.
#ifndef ENGINE_UNIMPLEMENTED_H_
#define ENGINE_UNIMPLEMENTED_H_

#include "absl/status/status.h"
#include "config/config.pb.h"

namespace tessera {

// OK if the engine does all that the resolved `config` asks for; else
// Unimplemented naming the keys. Keys that change no numbers, but only speed
// and memory (bucket sizes, thresholds, overlap), are not looked at. LOCAL.
absl::Status CheckImplemented(const proto::Config& config);

}  // namespace tessera
#endif  // ENGINE_UNIMPLEMENTED_H_
