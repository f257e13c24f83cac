// Reads the keys of an object of a config.json, with errors that name file,
// line, column and key.
#ifndef EXAMPLES_LLAMA_CONFIG_KEYS_H_
#define EXAMPLES_LLAMA_CONFIG_KEYS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "config/reader/json_reader.h"

// Keeps the first fault and continues. A key that is absent or null leaves what
// is there: to transformers both mean its default.
class LlamaConfigKeys {
 public:
  // `object` may be null, which has no keys. Both outlive this; `where` is the
  // file, for messages.
  LlamaConfigKeys(const tessera::JsonValue* object, absl::string_view where)
      : object_(object), where_(where) {}

  void Read(absl::string_view key, int64_t* out, int64_t least = 1);
  void Read(absl::string_view key, double* out);  // above 0
  void Read(absl::string_view key, bool* out);
  // Returns the object of that key; nullptr if there is none.
  const tessera::JsonValue* Object(absl::string_view key);
  // Returns the word of that key, one of `words`; the first if there is none.
  // Any other is Unimplemented, since it would be another model.
  std::string OneOf(absl::string_view key, std::vector<std::string> words);
  // Checks a number that would change the model unless it is `usual`:
  // Unimplemented.
  void Usual(absl::string_view key, double usual);

  // Adds the fault `what` at the place of `value`: InvalidArgument.
  void Refuse(const tessera::JsonValue& value, absl::string_view what);
  const absl::Status& status() const { return status_; }

 private:
  // Returns nullptr if the key is absent or null.
  const tessera::JsonValue* Find(absl::string_view key) const;
  std::string At(const tessera::JsonValue& value) const;
  void Expected(const tessera::JsonValue& value, absl::string_view key,
                absl::string_view what);

  const tessera::JsonValue* const object_;
  const absl::string_view where_;
  absl::Status status_;
};

#endif  // EXAMPLES_LLAMA_CONFIG_KEYS_H_
