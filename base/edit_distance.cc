#include "base/edit_distance.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "absl/strings/ascii.h"

namespace tessera {

int EditDistance(absl::string_view a, absl::string_view b) {
  // row[j]: the distance of the part of `a` read so far to b[0, j).
  std::vector<int> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 0; i < a.size(); ++i) {
    int diagonal = row[0];
    row[0] = static_cast<int>(i) + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const int replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row[b.size()];
}

std::string NearestName(absl::string_view name,
                        const std::vector<std::string>& names) {
  constexpr size_t kLeastPrefix = 6;
  const std::string wanted = absl::AsciiStrToLower(name);
  std::string nearest;
  int best = std::numeric_limits<int>::max();
  for (const std::string& known : names) {
    const std::string lower = absl::AsciiStrToLower(known);
    int distance = EditDistance(wanted, lower);
    const size_t common = std::min(wanted.size(), lower.size());
    const bool begins = common >= kLeastPrefix &&
                        wanted.substr(0, common) == lower.substr(0, common);
    if (begins) distance = std::min(distance, 1);
    const auto longest =
        static_cast<int>(std::max(wanted.size(), lower.size()));
    if (distance < best && 3 * distance <= longest) {
      nearest = known;
      best = distance;
    }
  }
  return nearest;
}

}  // namespace tessera
