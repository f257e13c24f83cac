// Reads text into a protobuf message, through reflection, with positions and
// all faults.
//
// Protobuf's own JSON reader is not used: it ends at the first fault, keeps no
// positions, and knows neither DeepSpeed's second names of keys nor "auto". Its
// reader of text format keeps positions, and is used.
//
// The message type is the schema. A JSON key is a field's name (or what its
// options say, config/reader/json_options.proto), an object is a message, an
// array a repeated field; a map's keys are free, and a FreeForm takes anything.
// Protobuf text format has names only.
#ifndef CONFIG_READER_PROTO_READER_H_
#define CONFIG_READER_PROTO_READER_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/strings/string_view.h"
#include "config/reader/json_reader.h"
#include "google/protobuf/message.h"

namespace tessera {

// One thing that is wrong.
struct ConfigFault {
  std::string path;  // as written: "optimizer.params.betas[1]"
  std::string what;
  std::optional<JsonPosition> position;  // if it comes from a file
  bool is_unknown_key = false;
};

// ReadRecord is what reading found, besides the message. Paths consist of field
// names: "zero_optimization.stage".
struct ReadRecord {
  // The position of the value of each path.
  absl::btree_map<std::string, JsonPosition> positions;
  std::vector<ConfigFault> faults;
  // Paths that get no further faults, since what the user meant there is not
  // known: faulty ones and those offered for an unknown key.
  std::vector<std::string> doubtful_paths;
  // Fields that are written as "auto", and left unset.
  std::vector<std::string> autos;
  // What the user should know though it is no fault.
  std::vector<ConfigFault> notes;
  // The path with the key that the file has, where that is not the field's
  // name.
  absl::btree_map<std::string, std::string> spellings;

  // Returns the path of a field, or of something inside one, as the file has
  // it.
  std::string AsWritten(const std::string& path) const;
};

// Says what becomes of a key that the schema does not have: a fault, or a note.
// kForeign makes it a note at the top level of JSON if other programs are known
// to write it there (WhoseKey, config/reader/json_keys.h), otherwise a fault.
enum class UnknownKeys { kFaults, kForeign, kNotes };

// Sets the fields of `message` from `root`. Faulty parts are left unset and
// recorded. Comment keys (IsCommentKey, config/reader/json_keys.h) are skipped.
void ReadProtoFromJson(const JsonValue& root,
                       google::protobuf::Message* message, ReadRecord* record,
                       UnknownKeys unknown_keys = UnknownKeys::kFaults);

// Sets `message` from protobuf text. A syntax error, or an unknown field, is
// recorded with an empty path; then `message` holds only part.
void ReadProtoFromText(absl::string_view text,
                       google::protobuf::Message* message, ReadRecord* record,
                       UnknownKeys unknown_keys = UnknownKeys::kFaults);

}  // namespace tessera
#endif  // CONFIG_READER_PROTO_READER_H_
