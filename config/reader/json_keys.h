// The JSON keys of a message type's fields (config/reader/json_options.proto),
// and the key that someone meant who wrote another.
#ifndef CONFIG_READER_JSON_KEYS_H_
#define CONFIG_READER_JSON_KEYS_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "google/protobuf/descriptor.h"

namespace tessera {

// The field's keys: those of its json_key option, or its name.
std::vector<std::string> JsonKeys(
    const google::protobuf::FieldDescriptor& field);

// Whether people write remarks under that key: "_", "//" or "#" in front, or
// "comment". What it holds is not looked at.
bool IsCommentKey(absl::string_view key);

bool HasJsonKey(const google::protobuf::FieldDescriptor& field,
                absl::string_view key);
// Whether one of `level`'s own fields has it.
bool HasJsonKey(const google::protobuf::Descriptor& level,
                absl::string_view key);

// The key that says what `key` does in another library ("lr" for
// learning_rate); any other as it is.
std::string KeyMeant(absl::string_view key);

// Of a key that others than DeepSpeed are known to write at the top level of
// its configurations, and that changes nothing of the numbers: whose it is and
// what does that here. Null: it is none of those.
const char* WhoseKey(absl::string_view key);

// Where `key` belongs: the path of the one field that has it, among those of
// `schema` and of all messages inside that have an effect. "" if there is none,
// or several.
std::string FindKeyElsewhere(const google::protobuf::Descriptor& schema,
                             absl::string_view key);

// The nearest of the keys of `level`'s own fields, "" if none is near; one that
// is refused, or not there yet, only if no other is.
std::string FindNearestKey(const google::protobuf::Descriptor& level,
                           absl::string_view key);

// Whether the field takes any JSON object, unread.
bool IsFreeForm(const google::protobuf::FieldDescriptor& field);

}  // namespace tessera
#endif  // CONFIG_READER_JSON_KEYS_H_
