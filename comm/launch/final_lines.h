// FinalLines: merges the ranks' lines for stderr. An error that several ranks
// end with is written once:
//
//   [0] INVALID_ARGUMENT: optimizer.lr ...      [0-2] INVALID_ARGUMENT: ...
//   [1] INVALID_ARGUMENT: optimizer.lr ...  ->  [3] UNAVAILABLE: ...
//   [3] UNAVAILABLE: ...
//   [2] INVALID_ARGUMENT: optimizer.lr ...
//
// Only lines that look like an absl::Status are held, for kHeld at most, until
// all ranks have written the same, or the job has ended. The lines of a rank
// stay in order, and none is lost, unless the launcher is killed meanwhile.
// Pure.
#ifndef COMM_LAUNCH_FINAL_LINES_H_
#define COMM_LAUNCH_FINAL_LINES_H_

#include <deque>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace tessera {

// Returns "0", "0-3", "0, 2-3" for increasing numbers.
std::string RankRanges(const std::vector<int>& ranks);

class FinalLines {
 public:
  static constexpr absl::Duration kHeld = absl::Seconds(2);

  explicit FinalLines(int num_ranks) : num_ranks_(num_ranks) {}

  // These calls return what must be written now. `line` has its line end, and
  // no prefix.
  std::string Add(int rank, absl::string_view line, absl::Duration now);
  // Adds a line of the launcher, after the lines that are held.
  std::string AddOwn(std::string line);
  std::string Due(absl::Duration now);
  std::string All();

  // Returns when Due has something; infinite if nothing is held.
  absl::Duration next() const;

 private:
  struct Held {
    std::string text;
    std::vector<int> ranks;  // sorted; none: the launcher's own
    absl::Duration since;
  };
  // The place of the last that is of `rank`, plus one; 0 if none is.
  size_t EndOf(int rank) const;
  std::string Release(size_t count);
  std::string ReleaseComplete();

  const int num_ranks_;
  std::deque<Held> held_;
};

}  // namespace tessera
#endif  // COMM_LAUNCH_FINAL_LINES_H_
