// The schema's defaults, written into a message.
#ifndef CONFIG_DEFAULTS_H_
#define CONFIG_DEFAULTS_H_

#include "google/protobuf/message.h"

namespace tessera {

// Sets each absent field of `message` that is honoured and has a default in its
// .proto to that default, but for those of a oneof that has a value. Looks into
// no message inside.
void FillDefaults(google::protobuf::Message* message);

}  // namespace tessera
#endif  // CONFIG_DEFAULTS_H_
