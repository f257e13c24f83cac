// Writes the schema's defaults into a message.
#ifndef CONFIG_DEFAULTS_H_
#define CONFIG_DEFAULTS_H_

#include "google/protobuf/message.h"

namespace tessera {

// Sets each absent field of `message` that is supported and has a default in
// its .proto to that default, except fields of a oneof that has a value. It
// does not descend into messages inside.
//
// A field that is not supported (no_effect, not_yet) stays absent, since
// NoteIneffectiveKeys and CheckRunnable tell the user about fields that are
// set, and a completed configuration must resolve to itself. So config_text.cc,
// which shows those defaults too, takes them from the schema (IsShown there)
// and not from the message.
void FillDefaults(google::protobuf::Message* message);

}  // namespace tessera
#endif  // CONFIG_DEFAULTS_H_
