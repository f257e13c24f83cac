#include "base/edit_distance.h"

#include <algorithm>
#include <numeric>
#include <vector>

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

}  // namespace tessera
