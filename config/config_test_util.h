// Helpers that the tests of configurations share.
#ifndef CONFIG_CONFIG_TEST_UTIL_H_
#define CONFIG_CONFIG_TEST_UTIL_H_

#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "config/config.h"

namespace tessera {

// Returns a JSON object with these members, and a clipping that every engine
// supports.
inline std::string Json(absl::string_view members) {
  return absl::StrCat("{\"gradient_clipping\": 0, ", members, "}");
}

// The end of the message of the last unknown key in a JSON config.
constexpr char kHowToIgnore[] =
    " (\"unknown_keys\": \"warn\" ignores such keys)";

// Returns the only fault of a JSON config without position and kHowToIgnore:
// "path: what".
inline std::string FaultOf(absl::string_view json, int world_size = 1) {
  const absl::StatusOr<proto::Config> config =
      ParseConfig(json, "f.json", world_size);
  if (config.ok()) return "OK";
  std::string message(config.status().message());
  if (!absl::StartsWith(message, "f.json:")) return message;
  // The message is "f.json:1:2: what" or "f.json: what".
  return std::string(absl::StripSuffix(
      absl::string_view(message).substr(message.find(": ") + 2), kHowToIgnore));
}

inline std::string OptimizerJson(absl::string_view optimizer) {
  return Json(
      absl::StrCat("\"train_batch_size\": 1, \"optimizer\": ", optimizer));
}

inline std::string ParamsJson(absl::string_view params) {
  return OptimizerJson(
      absl::StrCat("{\"type\": \"Adam\", \"params\": {", params, "}}"));
}

}  // namespace tessera
#endif  // CONFIG_CONFIG_TEST_UTIL_H_
