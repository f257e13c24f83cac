#include "base/edit_distance.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <numeric>

#include "absl/strings/ascii.h"

namespace tessera {

int EditDistance(absl::string_view a, absl::string_view b) {
  // rows[k][j]: the distance of a[0, i + 1 - k) to b[0, j), once row i is done.
  std::vector<int> rows[3];
  for (std::vector<int>& row : rows) row.resize(b.size() + 1);
  std::iota(rows[0].begin(), rows[0].end(), 0);
  for (size_t i = 0; i < a.size(); ++i) {
    std::rotate(std::begin(rows), std::begin(rows) + 2, std::end(rows));
    rows[0][0] = static_cast<int>(i) + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      int& best = rows[0][j + 1];
      best = std::min({rows[1][j] + (a[i] == b[j] ? 0 : 1), rows[1][j + 1] + 1,
                       rows[0][j] + 1});
      const bool exchanged =
          i > 0 && j > 0 && a[i] == b[j - 1] && a[i - 1] == b[j];
      if (exchanged) best = std::min(best, rows[2][j - 1] + 1);
    }
  }
  return rows[0][b.size()];
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
