#include "comm/launch/slurm_lists.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace tessera {
namespace {

constexpr int kMaxNodes = 1 << 20;

absl::Status Misfit(absl::string_view expected, absl::string_view list) {
  return absl::InvalidArgumentError(
      absl::StrCat("expected ", expected, ", got '", list, "'"));
}

bool AreDigits(absl::string_view text) {
  return !text.empty() &&
         std::all_of(text.begin(), text.end(), absl::ascii_isdigit);
}

// Returns "01" for "01-03,7"; empty if it is not a list of numbers and ranges.
std::string FirstOfRanges(absl::string_view ranges) {
  for (absl::string_view range : absl::StrSplit(ranges, ',')) {
    const std::pair<absl::string_view, absl::string_view> ends =
        absl::StrSplit(range, absl::MaxSplits('-', 1));
    const bool single = range.find('-') == absl::string_view::npos;
    if (!AreDigits(ends.first) || (!single && !AreDigits(ends.second))) {
      return "";
    }
  }
  return std::string(ranges.substr(0, ranges.find_first_of(",-")));
}

bool IsHostCharacter(char c) {
  return absl::ascii_isalnum(c) || c == '-' || c == '_' || c == '.' || c == ':';
}

}  // namespace

absl::StatusOr<std::string> FirstSlurmHost(absl::string_view list) {
  const absl::Status misfit = Misfit("hosts such as node[01-03,7],login", list);
  std::string host;
  for (size_t i = 0; i < list.size() && list[i] != ',';) {
    if (list[i] != '[') {
      if (!IsHostCharacter(list[i])) return misfit;
      host += list[i++];
      continue;
    }
    const size_t end = list.find(']', i);
    if (end == absl::string_view::npos) return misfit;
    const std::string first = FirstOfRanges(list.substr(i + 1, end - i - 1));
    if (first.empty()) return misfit;
    host += first;
    i = end + 1;
  }
  if (host.empty()) return misfit;
  return host;
}

absl::StatusOr<std::vector<int>> SlurmTaskCounts(absl::string_view list) {
  const absl::Status misfit = Misfit("tasks such as 2(x3),1", list);
  std::vector<int> counts;
  for (absl::string_view part : absl::StrSplit(list, ',')) {
    const size_t bracket = part.find("(x");
    int times = 1;
    if (bracket != absl::string_view::npos) {
      absl::string_view repeat = part.substr(bracket + 2);
      if (!absl::ConsumeSuffix(&repeat, ")") ||
          !absl::SimpleAtoi(repeat, &times)) {
        return misfit;
      }
    }
    int count = 0;
    if (!absl::SimpleAtoi(part.substr(0, bracket), &count) || count < 0 ||
        times < 1 || times > kMaxNodes - static_cast<int>(counts.size())) {
      return misfit;
    }
    counts.insert(counts.end(), times, count);
  }
  return counts;
}

}  // namespace tessera
