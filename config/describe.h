// What there is to say about each key of a configuration, out of its schema:
// for `tessera config explain`, docs/config.md and editors.
#ifndef CONFIG_DESCRIBE_H_
#define CONFIG_DESCRIBE_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace tessera {

struct KeyDescription {
  std::string path;                     // "zero_optimization.stage"
  std::vector<std::string> other_keys;  // of the same field, paths too
  std::string kind;           // "integer", "list of strings", "section", ...
  std::string default_value;  // "" if there is none
  std::string allowed;        // "0 to 127", "none, cpu or nvme"; "" for any
  // "honoured", "no effect", "not yet", "deprecated", "refused"
  std::string fate;
  std::string why;      // of a fate other than the first
  std::string comment;  // one paragraph
};

// In the order of the schema; a section stands before its keys.
std::vector<KeyDescription> DescribeKeys();

// Those that `key` may mean: the path itself, or all whose path ends in it.
std::vector<KeyDescription> FindKeys(absl::string_view key);

// Some lines of text about one key.
std::string Explain(const KeyDescription& key);

// The tables of docs/config.md.
std::string KeyTables();

// JSON schema (draft 7), for editors.
std::string JsonSchema();

}  // namespace tessera
#endif  // CONFIG_DESCRIBE_H_
