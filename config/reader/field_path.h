// Accesses fields of nested messages by their path: "zero_optimization.stage".
// REQUIRES: there is such a field.
#ifndef CONFIG_READER_FIELD_PATH_H_
#define CONFIG_READER_FIELD_PATH_H_

#include <string>

#include "absl/strings/string_view.h"
#include "google/protobuf/message.h"

namespace tessera {

// Return the path of a message's field, of a list's element.
std::string MemberPath(absl::string_view path, absl::string_view field);
std::string ElementPath(absl::string_view path, size_t index);

// Returns whether the field is set; for a list, whether it is not empty.
bool HasField(const google::protobuf::Message& message, absl::string_view path);
// Returns the field's value in text format; a list's values joined by commas.
// REQUIRES: it is set.
std::string FieldText(const google::protobuf::Message& message,
                      absl::string_view path);
// Copies a field. REQUIRES: both messages are of one type, and `from` has the
// field.
void CopyField(const google::protobuf::Message& from, absl::string_view path,
               google::protobuf::Message* to);

}  // namespace tessera
#endif  // CONFIG_READER_FIELD_PATH_H_
