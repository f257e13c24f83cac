// Parses JSON text into a small tree in which every value and every key knows
// its line and column.
//
// It reads strict JSON (RFC 8259) and what people write in DeepSpeed files:
// comments (// and # to the end of the line, /* */), a comma after the last
// element, and a UTF-8 byte order mark. It refuses duplicate keys, lone
// surrogates, text that is not UTF-8, unquoted or single-quoted strings, NaN,
// Infinity, and whatever exceeds JsonLimits.
//
// Threads: functions have no state; a JsonValue is plain data.
#ifndef CONFIG_READER_JSON_READER_H_
#define CONFIG_READER_JSON_READER_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tessera {

// Lines and columns count from 1; the column counts characters, not bytes.
struct JsonPosition {
  int line = 1;
  int column = 1;
};

// The positions of what no file has (config/reader/overrides.h): overrides, and
// keys that a program sets by a TrainingConfig.
inline constexpr JsonPosition kOverride = {0, 0};
inline constexpr JsonPosition kInCode = {0, 1};

enum class JsonKind { kNull, kBool, kNumber, kString, kArray, kObject };

// Returns "null", "a boolean", "a number", "a string", "an array" or "an
// object".
absl::string_view JsonKindName(JsonKind kind);

struct JsonMember;

struct JsonValue {
  JsonKind kind = JsonKind::kNull;
  JsonPosition position;  // of the first character

  bool boolean = false;             // kBool
  double number = 0;                // kNumber: the nearest double
  std::string text;                 // kString: its content (UTF-8);
                                    // kNumber: as written
  std::vector<JsonValue> elements;  // kArray
  std::vector<JsonMember> members;  // kObject, in the order of the file

  // Returns the exact integer if this is a number that is a 64-bit integer:
  // 50000000, 5e7, 2.0, 1e18.
  std::optional<int64_t> AsInt64() const;

  // Returns the member of that key, or nullptr. REQUIRES: kind == kObject.
  const JsonValue* Find(absl::string_view key) const;

  // Return the member of that key where this is an object that has it, as a
  // number or a string; otherwise what stands for it.
  double NumberAt(absl::string_view key, double otherwise) const;
  std::string TextAt(absl::string_view key) const;
};

struct JsonMember {
  std::string key;
  JsonPosition key_position;
  JsonValue value;
};

struct JsonLimits {
  int max_depth = 64;             // nested arrays and objects
  int64_t max_bytes = 16 << 20;   // bytes of the whole text
  int64_t max_values = 16 << 20;  // values in the text, at any depth
};

// A key that its object has already; its value is read and left out.
struct JsonDuplicate {
  std::string path;  // "zero_optimization.stage"
  JsonPosition position, first;
};

// Returns the one value that `text` holds, or InvalidArgument with
// "file_name:line:column: what is wrong" for the first fault. With
// `duplicates`, repeated keys of an object are added to it instead of being a
// fault.
absl::StatusOr<JsonValue> ReadJson(
    absl::string_view text, absl::string_view file_name,
    const JsonLimits& limits = {},
    std::vector<JsonDuplicate>* duplicates = nullptr);

// Returns the value as strict JSON on one line, with numbers as they were
// written.
std::string ToJsonText(const JsonValue& value);

// Returns "file_name:line:column", "--set" for kOverride, and "TrainingConfig"
// for kInCode.
std::string FormatPosition(absl::string_view file_name, JsonPosition position);

}  // namespace tessera
#endif  // CONFIG_READER_JSON_READER_H_
