// Applies what the options of the schema's fields
// (config/reader/json_options.proto) say about the values of a message: ranges,
// words, and whether a field has an effect.
#ifndef CONFIG_READER_FIELD_RULES_H_
#define CONFIG_READER_FIELD_RULES_H_

#include <string>
#include <vector>

#include "config/reader/faults.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"

namespace tessera {

// Adds a fault for each value that is out of its range or no word of its list,
// and for each refused field. Gives words the case of the list.
void CheckFields(google::protobuf::Message* message, Faults* faults);

// Adds a note for each written field that has no effect or is deprecated. In a
// message that was made in code, whatever differs from its default counts as
// written.
void NoteIneffectiveKeys(const google::protobuf::Message& message,
                         Faults* faults);

// Returns a line for each field whose value needs something that this version
// lacks: "path: value: what is missing".
std::vector<std::string> MissingFeatures(
    const google::protobuf::Message& message);

// Returns whether the field is set; for a list, whether it is not empty.
bool IsSet(const google::protobuf::Message& message,
           const google::protobuf::FieldDescriptor& field);
// Returns whether a scalar has its default in the schema.
bool IsDefault(const google::protobuf::Message& message,
               const google::protobuf::FieldDescriptor& field);
// Returns whether the field is one section, whose keys the schema knows.
bool IsSection(const google::protobuf::FieldDescriptor& field);

// Returns "at least 1", "0 to 127", "a finite number above 0"; "" if any number
// is allowed.
std::string RangeOf(const google::protobuf::FieldDescriptor& field);

// Returns "none, cpu or nvme".
std::string JoinWords(const std::vector<std::string>& words);

// Returns a scalar in text format: 3, true, "cpu".
std::string ValueText(const google::protobuf::Message& message,
                      const google::protobuf::FieldDescriptor& field,
                      int index = -1);

}  // namespace tessera
#endif  // CONFIG_READER_FIELD_RULES_H_
