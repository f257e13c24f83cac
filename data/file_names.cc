#include "data/file_names.h"

#include <glob.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"

namespace tessera {
namespace {

constexpr int64_t kMaxNames = 1'000'000;

bool AllDigits(absl::string_view text) {
  return !text.empty() && text.size() <= 18 &&
         std::all_of(text.begin(), text.end(),
                     [](char c) { return c >= '0' && c <= '9'; });
}

std::string Padded(int64_t number, size_t width) {
  std::string digits = absl::StrCat(number);
  if (digits.size() < width) digits.insert(0, width - digits.size(), '0');
  return digits;
}

// Returns the list that stands between braces; absent if it is none.
absl::StatusOr<std::optional<std::vector<std::string>>> Choices(
    absl::string_view inside, absl::string_view pattern) {
  using Result = std::optional<std::vector<std::string>>;
  const size_t dots = inside.find("..");
  if (dots != absl::string_view::npos) {
    const absl::string_view first = inside.substr(0, dots);
    const absl::string_view last = inside.substr(dots + 2);
    int64_t from, to;
    if (AllDigits(first) && AllDigits(last) && absl::SimpleAtoi(first, &from) &&
        absl::SimpleAtoi(last, &to)) {
      if (to < from || to - from >= kMaxNames) {
        return absl::InvalidArgumentError(
            absl::StrCat(pattern, ": expected a range of 1 to ", kMaxNames,
                         " numbers that grow, got {", inside, "}"));
      }
      const bool zeros = (first.size() > 1 && first[0] == '0') ||
                         (last.size() > 1 && last[0] == '0');
      const size_t width = zeros ? std::max(first.size(), last.size()) : 0;
      std::vector<std::string> numbers;
      for (int64_t i = from; i <= to; ++i) numbers.push_back(Padded(i, width));
      return Result(std::move(numbers));
    }
  }
  if (inside.find(',') == absl::string_view::npos) return Result();
  return Result(std::vector<std::string>(absl::StrSplit(inside, ',')));
}

absl::Status Append(std::vector<std::string>* names,
                    const std::vector<std::string>& choices,
                    absl::string_view pattern) {
  if (static_cast<int64_t>(names->size() * choices.size()) > kMaxNames) {
    return absl::InvalidArgumentError(
        absl::StrCat(pattern, ": stands for more than ", kMaxNames, " files"));
  }
  std::vector<std::string> longer;
  longer.reserve(names->size() * choices.size());
  for (const std::string& name : *names) {
    for (const std::string& choice : choices) longer.push_back(name + choice);
  }
  *names = std::move(longer);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<std::string>> ExpandBraces(
    absl::string_view pattern) {
  std::vector<std::string> names = {""};
  absl::string_view rest = pattern;
  while (true) {
    const size_t open = rest.find('{');
    TESSERA_RETURN_IF_ERROR(
        Append(&names, {std::string(rest.substr(0, open))}, pattern));
    if (open == absl::string_view::npos) return names;
    const size_t close = rest.find('}', open);
    if (close == absl::string_view::npos) {
      return absl::InvalidArgumentError(
          absl::StrCat(pattern, ": the { at character ",
                       pattern.size() - rest.size() + open, " is not closed"));
    }
    const absl::string_view inside = rest.substr(open + 1, close - open - 1);
    TESSERA_ASSIGN_OR_RETURN(std::optional<std::vector<std::string>> choices,
                             Choices(inside, pattern));
    if (!choices.has_value()) choices = {absl::StrCat("{", inside, "}")};
    TESSERA_RETURN_IF_ERROR(Append(&names, *choices, pattern));
    rest.remove_prefix(close + 1);
  }
}

absl::StatusOr<std::vector<std::string>> MatchFiles(absl::string_view pattern) {
  TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                           ExpandBraces(pattern));
  std::vector<std::string> files;
  for (const std::string& name : names) {
    if (name.find_first_of("*?[") == std::string::npos) {
      files.push_back(name);
      continue;
    }
    glob_t found = {};
    const auto freed = absl::MakeCleanup([&found] { globfree(&found); });
    // Names are sorted below, since glob's own order depends on the locale.
    const int error = glob(name.c_str(), GLOB_NOSORT, nullptr, &found);
    if (error == GLOB_NOMATCH) {
      return absl::NotFoundError(absl::StrCat(name, ": matches no file"));
    }
    if (error != 0) {
      return absl::InternalError(
          absl::StrCat(name, ": glob failed with ", error));
    }
    const size_t before = files.size();
    files.insert(files.end(), found.gl_pathv, found.gl_pathv + found.gl_pathc);
    std::sort(files.begin() + static_cast<std::ptrdiff_t>(before), files.end());
  }
  return files;
}

}  // namespace tessera
