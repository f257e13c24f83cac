#include "comm/launch/final_lines.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace tessera {
namespace {

constexpr int kLastCode = static_cast<int>(absl::StatusCode::kUnauthenticated);

// "NOT_FOUND: ..." or "program: NOT_FOUND: ...", as Status::ToString has it.
bool IsError(absl::string_view line) {
  for (int pass = 0; pass < 2; ++pass) {
    for (int code = 1; code <= kLastCode; ++code) {
      const std::string name =
          absl::StatusCodeToString(static_cast<absl::StatusCode>(code));
      if (absl::StartsWith(line, name + ": "))
        return absl::EndsWith(line, "\n");
    }
    const size_t colon = line.find(": ");
    if (colon == absl::string_view::npos) return false;
    line.remove_prefix(colon + 2);
  }
  return false;
}

}  // namespace

std::string RankRanges(const std::vector<int>& ranks) {
  std::vector<std::string> ranges;
  for (size_t i = 0; i < ranks.size();) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) {
      ++last;
    }
    ranges.push_back(last == i ? absl::StrCat(ranks[i])
                               : absl::StrCat(ranks[i], "-", ranks[last]));
    i = last + 1;
  }
  return absl::StrJoin(ranges, ", ");
}

std::string FinalLines::Add(int rank, absl::string_view line,
                            absl::Duration now) {
  const size_t after = EndOf(rank);
  if (!IsError(line)) {
    std::string out = Release(after);
    absl::StrAppend(&out, "[", rank, "] ", line);
    return out;
  }
  for (size_t i = after; i < held_.size(); ++i) {
    std::vector<int>& ranks = held_[i].ranks;
    if (ranks.empty() || held_[i].text != line) continue;
    ranks.insert(std::upper_bound(ranks.begin(), ranks.end(), rank), rank);
    return ReleaseComplete();
  }
  held_.push_back({std::string(line), {rank}, now});
  return ReleaseComplete();
}

std::string FinalLines::AddOwn(std::string line) {
  held_.push_back({std::move(line), {}, absl::InfiniteDuration()});
  return ReleaseComplete();
}

std::string FinalLines::Due(absl::Duration now) {
  size_t count = 0;
  for (size_t i = 0; i < held_.size(); ++i) {
    if (now - held_[i].since >= kHeld) count = i + 1;
  }
  return Release(count) + ReleaseComplete();
}

std::string FinalLines::All() { return Release(held_.size()); }

absl::Duration FinalLines::next() const {
  absl::Duration first = absl::InfiniteDuration();
  for (const Held& held : held_) first = std::min(first, held.since + kHeld);
  return first;
}

size_t FinalLines::EndOf(int rank) const {
  for (size_t i = held_.size(); i > 0; --i) {
    const std::vector<int>& ranks = held_[i - 1].ranks;
    if (std::binary_search(ranks.begin(), ranks.end(), rank)) return i;
  }
  return 0;
}

std::string FinalLines::Release(size_t count) {
  std::string out;
  for (; count > 0; --count) {
    const Held& held = held_.front();
    if (!held.ranks.empty()) {
      absl::StrAppend(&out, "[", RankRanges(held.ranks), "] ");
    }
    out += held.text;
    held_.pop_front();
  }
  return out;
}

// From the front on, since order is kept.
std::string FinalLines::ReleaseComplete() {
  size_t count = 0;
  while (count < held_.size() &&
         (held_[count].ranks.empty() ||
          static_cast<int>(held_[count].ranks.size()) == num_ranks_)) {
    ++count;
  }
  return Release(count);
}

}  // namespace tessera
