#include "checkpoint/format/step_name.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"

namespace tessera {
namespace {

constexpr absl::string_view kPrefix = "step-";

}  // namespace

std::string StepFolderName(int64_t step) {
  return absl::StrFormat("%s%08d", kPrefix, step);
}

std::optional<int64_t> StepInName(absl::string_view name) {
  absl::string_view digits = name;
  int64_t step = 0;
  if (!absl::ConsumePrefix(&digits, kPrefix) ||
      !std::all_of(digits.begin(), digits.end(), absl::ascii_isdigit) ||
      !absl::SimpleAtoi(digits, &step) || StepFolderName(step) != name) {
    return std::nullopt;
  }
  return step;
}

std::optional<int64_t> StepInPath(absl::string_view path) {
  while (absl::ConsumeSuffix(&path, "/")) {
  }
  return StepInName(path.substr(path.rfind('/') + 1));
}

}  // namespace tessera
