// Describes each key of a configuration by its schema: for `tessera config
// explain`, docs/config.md and editors.
#ifndef CONFIG_DESCRIBE_H_
#define CONFIG_DESCRIBE_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace tessera {

struct KeyDescription {
  std::string path;                     // "zero_optimization.stage"
  std::vector<std::string> other_keys;  // other paths of the same field
  std::string kind;           // "integer", "list of strings", "section", ...
  std::string default_value;  // "" if there is none
  std::string allowed;        // "0 to 127", "none, cpu or nvme"; "" for any
  // Whether the key has an effect: "supported", "no effect", "not yet",
  // "deprecated" or "refused".
  std::string support;
  std::string why;      // why it is not "supported"
  std::string comment;  // one paragraph
};

// Describes all keys in the order of the schema; a section comes before its
// keys.
std::vector<KeyDescription> DescribeKeys();

// Returns the keys that `key` may mean: the path itself, or all whose path ends
// in it.
std::vector<KeyDescription> FindKeys(absl::string_view key);

// Returns some lines of text about one key.
std::string Explain(const KeyDescription& key);

// Returns the tables of docs/config.md.
std::string KeyTables();

// Returns a JSON schema (draft 7), for editors.
std::string JsonSchema();

}  // namespace tessera
#endif  // CONFIG_DESCRIBE_H_
