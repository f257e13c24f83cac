#include "sharding/partition/names.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/edit_distance.h"

namespace tessera {
namespace {

absl::string_view StripImpl(absl::string_view name) {
  return absl::StripSuffix(name, "Impl");
}

int Distance(absl::string_view wanted, absl::string_view class_name) {
  wanted = StripImpl(wanted);
  return std::min(EditDistance(wanted, StripImpl(class_name)),
                  EditDistance(wanted, StripImpl(LastComponent(class_name))));
}

bool GlobMatches(absl::string_view pattern, absl::string_view text) {
  size_t p = 0, t = 0;
  // Where to go on if what follows the last '*' does not fit.
  size_t star = absl::string_view::npos, retry = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      retry = t;
    } else if (p < pattern.size() &&
               (pattern[p] == '?' || pattern[p] == text[t])) {
      ++p;
      ++t;
    } else if (star != absl::string_view::npos) {
      p = star + 1;
      t = ++retry;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', p) == absl::string_view::npos;
}

}  // namespace

absl::string_view LastComponent(absl::string_view class_name) {
  int depth = 0;
  for (size_t i = class_name.size(); i > 0; --i) {
    const char c = class_name[i - 1];
    if (c == '>' || c == ')') ++depth;
    if (c == '<' || c == '(') --depth;
    if (c == ':' && depth == 0) return class_name.substr(i);
  }
  return class_name;
}

ClassNames::ClassNames(absl::string_view option,
                       const std::vector<std::string>& wanted)
    : option_(option), wanted_(wanted) {
  for (const auto& name : wanted) matched_[StripImpl(name)] = false;
}

bool ClassNames::Match(absl::string_view class_name) {
  bool any = false;
  for (absl::string_view name : {class_name, LastComponent(class_name)}) {
    const auto it = matched_.find(StripImpl(name));
    if (it == matched_.end()) continue;
    it->second = true;
    any = true;
  }
  return any;
}

absl::Status ClassNames::CheckMatched(
    const absl::flat_hash_set<std::string>& present) const {
  for (const auto& wanted : wanted_) {
    if (matched_.at(StripImpl(wanted))) continue;
    std::vector<std::pair<int, std::string>> classes;
    for (const auto& name : present) {
      classes.push_back({Distance(wanted, name), name});
    }
    std::sort(classes.begin(), classes.end());
    return absl::InvalidArgumentError(absl::StrCat(
        option_, ": no module is of class '", wanted,
        "'; expected one of these, nearest first: ",
        absl::StrJoin(classes, ", ", [](std::string* out, const auto& c) {
          absl::StrAppend(out, c.second);
        })));
  }
  return absl::OkStatus();
}

PathPatterns::PathPatterns(absl::string_view option,
                           const std::vector<std::string>& patterns)
    : option_(option), patterns_(patterns) {
  for (const auto& pattern : patterns) {
    matched_[pattern] = false;
    if (absl::StrContains(pattern, '*') || absl::StrContains(pattern, '?')) {
      wild_.push_back(pattern);
    }
  }
}

bool PathPatterns::Match(absl::string_view path) {
  bool any = false;
  if (const auto it = matched_.find(path); it != matched_.end()) {
    it->second = true;
    any = true;
  }
  for (const auto& pattern : wild_) {
    bool& matched = matched_.at(pattern);
    if (any && matched) continue;
    if (!GlobMatches(pattern, path)) continue;
    matched = true;
    any = true;
  }
  return any;
}

absl::Status PathPatterns::CheckMatched(const std::vector<std::string>& present,
                                        bool of_modules) const {
  constexpr size_t kShown = 3;
  for (const auto& pattern : patterns_) {
    if (matched_.at(pattern)) continue;
    std::vector<std::pair<int, std::string>> nearest;
    for (const std::string& path : present) {
      nearest.emplace_back(EditDistance(pattern, path), path);
    }
    std::sort(nearest.begin(), nearest.end());
    if (nearest.size() > kShown) nearest.resize(kShown);
    return absl::InvalidArgumentError(
        absl::StrCat(option_, ": '", pattern, "' is not a parameter",
                     of_modules ? " or module" : "",
                     "; expected names as of named_parameters()",
                     of_modules ? " and named_modules()" : "", ", such as '",
                     absl::StrJoin(nearest, "', '",
                                   [](std::string* out, const auto& path) {
                                     absl::StrAppend(out, path.second);
                                   }),
                     "'; '*' stands for any characters, '?' for one"));
  }
  return absl::OkStatus();
}

std::string DistinctNames::Take(const std::string& name) {
  std::string distinct = name;
  while (!taken_.try_emplace(distinct, 1).second) {
    distinct = absl::StrCat(name, " (", ++taken_[name], ")");
  }
  return distinct;
}

}  // namespace tessera
