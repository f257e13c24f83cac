#include "comm/hierarchical/host_plan.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>

namespace tessera {
namespace {

// The longest sequences of ranks of one host.
std::vector<Stop> RunsOf(const HostPlacement& placement) {
  std::vector<Stop> runs;
  for (int r = 0; r < placement.num_ranks(); ++r) {
    const int host = placement.host_of(r);
    if (runs.empty() || runs.back().host != host) runs.push_back({host, r, r});
    runs.back().end = r + 1;
  }
  return runs;
}

}  // namespace

HostPlacement::HostPlacement(const std::vector<int>& hosts) {
  std::map<int, int> index;
  for (int host : hosts) {
    const int h =
        index.emplace(host, static_cast<int>(index.size())).first->second;
    if (h == num_hosts()) ranks_of_.emplace_back();
    local_rank_of_.push_back(static_cast<int>(ranks_of_[h].size()));
    ranks_of_[h].push_back(static_cast<int>(host_of_.size()));
    host_of_.push_back(h);
  }
}

std::vector<Stop> PlanSum(const HostPlacement& placement, int owner,
                          int partial_bytes) {
  const std::vector<Stop> runs = RunsOf(placement);
  const int hosts = placement.num_hosts();
  // Among ways with equally many bytes the one with the fewest moves is taken,
  // except for contributions of several ranks, which all leave one host.
  const int64_t unit = 4 * placement.num_ranks();
  // cheapest[k][h]: with runs 0 to k in a sum on host h, which was on host
  // from[k][h] before run k.
  std::vector<std::vector<int64_t>> cheapest(runs.size());
  std::vector<std::vector<int>> from(runs.size());
  for (size_t k = 0; k < runs.size(); ++k) {
    for (int h = 0; h < hosts; ++h) {
      int64_t least = k == 0 ? 0 : INT64_MAX;
      int best = h;
      for (int g = 0; k > 0 && g < hosts; ++g) {
        const int64_t cost =
            cheapest[k - 1][g] + (g == h ? 0 : partial_bytes * unit + 1);
        if (cost < least) {
          least = cost;
          best = g;
        }
      }
      const int64_t as_they_are = runs[k].end - runs[k].first;
      cheapest[k].push_back(
          least +
          (runs[k].host == h ? 0 : as_they_are * unit + 2 * (as_they_are - 1)));
      from[k].push_back(best);
    }
  }
  int host = owner;
  for (int h = 0; h < hosts; ++h) {
    if (cheapest.back()[h] + unit < cheapest.back()[host]) host = h;
  }
  std::vector<Stop> stops;
  for (size_t k = runs.size(); k-- > 0; host = from[k][host]) {
    if (!stops.empty() && stops.back().host == host) {
      stops.back().first = runs[k].first;
    } else {
      stops.push_back({host, runs[k].first, runs[k].end});
    }
  }
  std::reverse(stops.begin(), stops.end());
  return stops;
}

Layout::Layout(std::vector<OwnedSlice> slices) : slices_(std::move(slices)) {
  const int64_t num_slices = static_cast<int64_t>(slices_.size());
  const int64_t rows = std::min<int64_t>(num_slices, kMaxRows);
  for (int64_t row = 0; row <= rows; ++row) {
    first_slice_.push_back(static_cast<int>(row * num_slices / rows));
  }
  for (int64_t row = 0; row < rows; ++row) {
    row_bytes_.push_back(0);
    for (int p = first_slice_[row]; p < first_slice_[row + 1]; ++p) {
      row_bytes_.back() += slices_[p].bytes;
    }
  }
}

int64_t Layout::NumWindows(int64_t window_bytes) const {
  const int64_t longest =
      *std::max_element(row_bytes_.begin(), row_bytes_.end());
  return (longest + window_bytes - 1) / window_bytes;
}

std::vector<Piece> Layout::PiecesOf(int64_t number,
                                    int64_t window_bytes) const {
  std::vector<Piece> pieces;
  for (int row = 0; row < static_cast<int>(row_bytes_.size()); ++row) {
    // The window's columns, in the tensor.
    const int64_t begin =
        slices_[first_slice_[row]].begin + number * window_bytes;
    for (int p = first_slice_[row]; p < first_slice_[row + 1]; ++p) {
      Piece piece;
      piece.begin = std::max(begin, slices_[p].begin);
      piece.bytes =
          std::min(begin + window_bytes, slices_[p].begin + slices_[p].bytes) -
          piece.begin;
      if (piece.bytes <= 0) continue;
      piece.slice = p;
      piece.row = row;
      piece.place = piece.begin - begin;
      piece.turn = number + p;
      pieces.push_back(piece);
    }
  }
  return pieces;
}

}  // namespace tessera
