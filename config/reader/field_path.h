// Fields of nested messages by their path: "zero_optimization.stage".
#ifndef CONFIG_READER_FIELD_PATH_H_
#define CONFIG_READER_FIELD_PATH_H_

#include <string>

#include "absl/strings/string_view.h"
#include "google/protobuf/message.h"

namespace tessera {

// Whether it is set; of a list, not empty. REQUIRES, as all here: there is such
// a field.
bool HasField(const google::protobuf::Message& message, absl::string_view path);
// Its value as text format has it; a list's joined by commas. REQUIRES: set.
std::string FieldText(const google::protobuf::Message& message,
                      absl::string_view path);
// REQUIRES: both are of one type, and `from` has it.
void CopyField(const google::protobuf::Message& from, absl::string_view path,
               google::protobuf::Message* to);

}  // namespace tessera
#endif  // CONFIG_READER_FIELD_PATH_H_
