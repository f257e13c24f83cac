#include "comm/nccl/nccl_environment.h"

#include <stdlib.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace tessera {
namespace {

bool IsName(absl::string_view name) {
  return absl::ConsumePrefix(&name, "NCCL_") && !name.empty() &&
         std::all_of(name.begin(), name.end(),
                     [](char c) { return absl::ascii_isalnum(c) || c == '_'; });
}

}  // namespace

absl::Status CheckNcclEnvironment(
    const std::map<std::string, std::string>& settings) {
  for (const auto& [name, value] : settings) {
    if (!IsName(name)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "NCCL setting '", absl::Utf8SafeCEscape(name),
          "': expected the name of a variable that begins with NCCL_"));
    }
    if (value.find('\0') != std::string::npos) {
      return absl::InvalidArgumentError(
          absl::StrCat("NCCL setting '", name, "': its value has a null byte"));
    }
  }
  return absl::OkStatus();
}

std::vector<std::string> SetNcclEnvironment(
    const std::map<std::string, std::string>& settings) {
  std::vector<std::string> set;
  for (const auto& [name, value] : settings) {
    if (getenv(name.c_str()) != nullptr) continue;
    setenv(name.c_str(), value.c_str(), /*overwrite=*/0);
    set.push_back(absl::StrCat(name, "=", value));
  }
  return set;
}

bool StartInHostOrder() {
  constexpr char kName[] = "NCCL_LAUNCH_ORDER_IMPLICIT";
  (void)SetNcclEnvironment({{kName, "1"}});
  return absl::string_view(getenv(kName)) == "1";
}

}  // namespace tessera
