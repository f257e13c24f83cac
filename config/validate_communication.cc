#include <algorithm>
#include <map>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "config/config.pb.h"
#include "config/validate.h"

namespace tessera {
namespace {

void CheckNccl(const std::string& name, const std::string& value,
               Faults* faults) {
  const std::string path =
      absl::StrCat("communication.nccl.", absl::Utf8SafeCEscape(name));
  absl::string_view rest = name;
  if (!absl::ConsumePrefix(&rest, "NCCL_") || rest.empty() ||
      !std::all_of(rest.begin(), rest.end(),
                   [](char c) { return absl::ascii_isalnum(c) || c == '_'; })) {
    faults->Add(path, "expected the name of a variable that begins with NCCL_");
  }
  if (value.find('\0') != std::string::npos) {
    faults->Add(path, "its value has a null byte");
  }
}

}  // namespace

void CheckCommunication(const proto::Communication& section, Faults* faults) {
  // Sort by name, since a map has no order.
  const std::map<std::string, std::string> settings(section.nccl().begin(),
                                                    section.nccl().end());
  for (const auto& setting : settings) {
    CheckNccl(setting.first, setting.second, faults);
  }
}

}  // namespace tessera
