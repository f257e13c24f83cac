// What the options of the schema's fields (config/reader/json_options.proto)
// say about the values of a message: ranges, words, and what becomes of a
// field.
#ifndef CONFIG_READER_FIELD_RULES_H_
#define CONFIG_READER_FIELD_RULES_H_

#include <string>
#include <vector>

#include "config/reader/faults.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"

namespace tessera {

// Adds a fault for each value out of its range, no word of its list, or of a
// field that is refused. Words are given the case of the list.
void CheckFields(google::protobuf::Message* message, Faults* faults);

// Adds a note for each field that is written and has no effect, or is
// deprecated. Of a message that was made in code, whatever differs from its
// default is written.
void NoteIneffectiveKeys(const google::protobuf::Message& message,
                         Faults* faults);

// A line for each field with a value that needs what is missing in this
// version: "path: value: what is missing".
std::vector<std::string> MissingFeatures(
    const google::protobuf::Message& message);

// "at least 1", "0 to 127", "a finite number above 0"; "" if any number will
// do.
std::string RangeOf(const google::protobuf::FieldDescriptor& field);

// "none, cpu or nvme"
std::string JoinWords(const std::vector<std::string>& words);

// A scalar as text format has it: 3, true, "cpu".
std::string ValueText(const google::protobuf::Message& message,
                      const google::protobuf::FieldDescriptor& field,
                      int index = -1);

}  // namespace tessera
#endif  // CONFIG_READER_FIELD_RULES_H_
