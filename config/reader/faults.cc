#include "config/reader/faults.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "base/edit_distance.h"

namespace tessera {

bool PathsOverlap(absl::string_view a, absl::string_view b) {
  if (a.size() > b.size()) std::swap(a, b);
  if (!absl::StartsWith(b, a)) return false;
  return a.empty() || a.size() == b.size() || b[a.size()] == '.' ||
         b[a.size()] == '[';
}

void Faults::AddText(const std::string& path, std::string what) {
  if (IsDoubtful(path)) return;
  faults_.push_back(At(path, std::move(what)));
  faulty_.push_back(path);
}

ConfigFault Faults::At(const std::string& path, std::string what) const {
  ConfigFault fault{record_.AsWritten(path), std::move(what), std::nullopt};
  // The position of something that is not in the file is that of what would
  // contain it.
  for (std::string at = path; !at.empty();) {
    const auto found = record_.positions.find(at);
    if (found != record_.positions.end()) {
      fault.position = found->second;
      break;
    }
    const size_t last = at.find_last_of(".[");
    at = last == at.npos ? "" : at.substr(0, last);
  }
  return fault;
}

bool Faults::IsDoubtful(absl::string_view path) const {
  const auto overlaps = [&](const std::string& other) {
    return PathsOverlap(path, other);
  };
  return std::any_of(record_.doubtful_paths.begin(),
                     record_.doubtful_paths.end(), overlaps) ||
         std::any_of(faulty_.begin(), faulty_.end(), overlaps);
}

bool Faults::IsWritten(const std::string& path) const {
  return record_.positions.count(path) != 0;
}

void Faults::AddUnknown(const std::string& path, const std::string& name,
                        const char* expected,
                        const std::vector<std::string>& names,
                        const std::vector<std::string>& others) {
  std::string nearest = NearestName(name, names);
  if (nearest.empty()) nearest = NearestName(name, others);
  Add(path, "expected ", expected, ", got '", absl::Utf8SafeCEscape(name), "'",
      nearest.empty() ? "" : absl::StrCat(", did you mean '", nearest, "'?"));
}

void Faults::CheckNoneEmpty(
    const std::string& path,
    const google::protobuf::RepeatedPtrField<std::string>& values) {
  for (int i = 0; i < values.size(); ++i) {
    if (values[i].empty()) {
      Add(absl::StrCat(path, "[", i, "]"), "expected a name, got ''");
    }
  }
}

}  // namespace tessera
