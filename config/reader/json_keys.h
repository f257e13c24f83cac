// Finds the JSON keys of a message type's fields
// (config/reader/json_options.proto), and the key that a user meant who wrote
// another.
#ifndef CONFIG_READER_JSON_KEYS_H_
#define CONFIG_READER_JSON_KEYS_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "google/protobuf/descriptor.h"

namespace tessera {

// Returns the field's keys: those of its json_key option, or its name.
std::vector<std::string> JsonKeys(
    const google::protobuf::FieldDescriptor& field);

// Returns whether people write remarks under that key: "_", "//" or "#" in
// front, or "comment". Its value is not read.
bool IsCommentKey(absl::string_view key);

bool HasJsonKey(const google::protobuf::FieldDescriptor& field,
                absl::string_view key);
// Returns whether one of `level`'s own fields has the key.
bool HasJsonKey(const google::protobuf::Descriptor& level,
                absl::string_view key);

// Returns the key that means what `key` means in another library ("lr" for
// learning_rate); any other key is returned as it is.
std::string KeyMeant(absl::string_view key);

// Returns whose key it is and what replaces it here, for a key that programs
// other than DeepSpeed are known to write at the top level of its
// configurations and that does not change the numbers. Null for other keys.
const char* WhoseKey(absl::string_view key);

// Returns where `key` belongs: the path of the one field that has it, among the
// fields of `schema` and of all messages inside that have an effect. "" if
// there is none, or several.
std::string FindKeyElsewhere(const google::protobuf::Descriptor& schema,
                             absl::string_view key);

// Returns the nearest of the keys of `level`'s own fields, "" if none is near.
// A key that is refused or not yet supported is returned only if no other is
// near.
std::string FindNearestKey(const google::protobuf::Descriptor& level,
                           absl::string_view key);

// Returns whether the field takes any JSON object, unread.
bool IsFreeForm(const google::protobuf::FieldDescriptor& field);

}  // namespace tessera
#endif  // CONFIG_READER_JSON_KEYS_H_
