#include "config/faults.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"

namespace tessera {

bool PathsOverlap(absl::string_view a, absl::string_view b) {
  if (a.size() > b.size()) std::swap(a, b);
  if (!absl::StartsWith(b, a)) return false;
  return a.empty() || a.size() == b.size() || b[a.size()] == '.' ||
         b[a.size()] == '[';
}

void Faults::AddText(const std::string& path, std::string what) {
  if (IsDoubtful(path)) return;
  ConfigFault fault{record_.AsWritten(path), std::move(what), std::nullopt};
  const auto found = record_.positions.find(path);
  if (found != record_.positions.end()) fault.position = found->second;
  faults_.push_back(std::move(fault));
}

bool Faults::IsDoubtful(absl::string_view path) const {
  return std::any_of(record_.doubtful_paths.begin(),
                     record_.doubtful_paths.end(),
                     [&](const std::string& doubtful) {
                       return PathsOverlap(path, doubtful);
                     });
}

bool Faults::IsWritten(const std::string& path) const {
  return record_.positions.count(path) != 0;
}

void Faults::CheckAtLeast(const std::string& path, int64_t value,
                          int64_t least) {
  if (value < least) Add(path, "expected at least ", least, ", got ", value);
}

void Faults::CheckAtLeast0(const std::string& path, double value) {
  if (value >= 0 && std::isfinite(value)) return;
  Add(path, "expected a finite number of at least 0, got ", value);
}

void Faults::CheckAbove0(const std::string& path, double value) {
  if (value > 0 && std::isfinite(value)) return;
  Add(path, "expected a finite number above 0, got ", value);
}

void Faults::CheckOneOf(const std::string& path, const std::string& value,
                        std::initializer_list<absl::string_view> words) {
  if (std::find(words.begin(), words.end(), value) != words.end()) return;
  std::string expected;
  for (const absl::string_view& word : words) {
    absl::StrAppend(&expected,
                    &word == words.begin()     ? ""
                    : &word == words.end() - 1 ? " or "
                                               : ", ",
                    word);
  }
  Add(path, "expected ", expected, ", got '", absl::Utf8SafeCEscape(value),
      "'");
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
