// Which host adds what, and which of its ranks: how sums in rank order run over
// several hosts. Every rank computes the same. No torch.
//
//   ranks   0 1 2 | 3 4 5     a sum that host B's rank 4 owns, of two hosts
//   hosts   A A A | B B B
//   stops   {A, 0..2} -> {B, 3..5}: A adds 0, 1, 2; B adds 3, 4, 5 to that
//
// The elements of a stop's ranks of other hosts travel there as they are, which
// is less where few ranks of a host follow each other.
#ifndef COMM_HIERARCHICAL_HOST_PLAN_H_
#define COMM_HIERARCHICAL_HOST_PLAN_H_

#include <cstdint>
#include <vector>

namespace tessera {

// Which ranks share a host.
class HostPlacement {
 public:
  // By rank: any number that the ranks of its host alone have.
  explicit HostPlacement(const std::vector<int>& hosts);

  int num_ranks() const { return static_cast<int>(host_of_.size()); }
  int num_hosts() const { return static_cast<int>(ranks_of_.size()); }
  int host_of(int rank) const {
    return host_of_[rank];
  }  // by first rank, from 0
  int local_rank_of(int rank) const { return local_rank_of_[rank]; }
  const std::vector<int>& ranks_of(int host) const { return ranks_of_[host]; }
  // A rank of `host`; all of them take their turns.
  int Lane(int host, int64_t turn) const {
    return ranks_of_[host][turn % ranks_of_[host].size()];
  }

 private:
  std::vector<int> host_of_, local_rank_of_;
  std::vector<std::vector<int>> ranks_of_;
};

// `host` adds the elements of ranks [first, end) to the sum so far.
struct Stop {
  int host = 0;
  int first = 0;
  int end = 0;
};

// The way of a sum over all ranks, in rank order, to `owner`, a host: the one
// with the fewest bytes between hosts, then with the fewest from one. An
// element of a sum that is not complete takes `partial_bytes` times the bytes
// of another.
std::vector<Stop> PlanSum(const HostPlacement& placement, int owner,
                          int partial_bytes);

// Bytes [begin, begin + bytes) of a tensor, which are rank `owner`'s.
struct OwnedSlice {
  int64_t begin = 0;
  int64_t bytes = 0;
  int owner = 0;
};

// What moves at once: never of more than one slice, or one window.
struct Piece {
  int64_t begin = 0;  // in the tensor
  int64_t bytes = 0;
  int slice = 0;
  int row = 0;
  int64_t place = 0;  // in the row's window
  int64_t turn = 0;   // whose turn it is, see HostPlacement::Lane
};

// The slices of a tensor as rows (comm/shm/exchange.h), so that all owners are
// served at the same time. With more slices than kMaxRows a row has several.
class Layout {
 public:
  static constexpr int kMaxRows = 8;
  // `slices` follow each other from 0 on; some may be empty.
  explicit Layout(std::vector<OwnedSlice> slices);

  const std::vector<OwnedSlice>& slices() const { return slices_; }
  const std::vector<int64_t>& row_bytes() const { return row_bytes_; }
  // Windows of `window_bytes` that all rows together have.
  int64_t NumWindows(int64_t window_bytes) const;
  // Columns [number * window_bytes, (number + 1) * window_bytes) of all rows.
  std::vector<Piece> PiecesOf(int64_t number, int64_t window_bytes) const;

 private:
  std::vector<OwnedSlice> slices_;
  std::vector<int> first_slice_;  // of row d; the last entry is the end
  std::vector<int64_t> row_bytes_;
};

}  // namespace tessera
#endif  // COMM_HIERARCHICAL_HOST_PLAN_H_
