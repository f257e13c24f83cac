// The schema's defaults, written into a message.
#ifndef CONFIG_DEFAULTS_H_
#define CONFIG_DEFAULTS_H_

#include "google/protobuf/message.h"

namespace tessera {

// Sets each absent field of `message` that is honoured and has a default in its
// .proto to that default, except those of a oneof that has a value. Looks into
// no message inside.
//
// What is not honoured (no_effect, not_yet) stays absent: being set is what
// NoteIneffectiveKeys and CheckRunnable tell the user about, and a completed
// configuration resolves to itself. So config_text.cc, which shows those
// defaults too, takes them from the schema (IsShown there) and not from the
// message.
void FillDefaults(google::protobuf::Message* message);

}  // namespace tessera
#endif  // CONFIG_DEFAULTS_H_
