// Exchange: runs the collectives of a Team one after the other, on plain
// memory: which rank reads what of which, and when. collectives.h has the
// operations.
//
// A rank lets the others read "rows": one for all, or one for each rank. Memory
// that the others map is read where it lies ("direct"). Any other is copied
// into the rank's staging area, a window (some columns of every row) at a time:
//
//   row 0  [--------|--------|---]      staging   [ slot 0 | slot 1 | ... ]
//   row 1  [--------|--------|---]   --window k-->  slot k % kSlots
//            window 0  1       2
//
// Order of one collective:
//   post      what it is, and where the rows are; all wait for all posts, and
//             compare them: ranks in different collectives get an error at once
//   ready     window k may be read
//   taken     window k has been read by this rank, of all others
// A rank leaves when nobody reads its own memory any more; on an error at once,
// and whoever still reads it then gets an error too. If the windows' sums are
// to go to all ranks (all-reduce), each window has a second half: the rank that
// summed its row lets the others read the sum.
//
// Errors, all final for the team: FailedPrecondition (ranks in different
// collectives; says both), Unavailable (another rank has given it up), and what
// Team::WaitFor returns.
//
// Threads: one at a time.
#ifndef COMM_SHM_EXCHANGE_H_
#define COMM_SHM_EXCHANGE_H_

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "comm/backend_table.h"
#include "comm/reduce/reduce.h"
#include "comm/shm/team.h"

namespace tessera::shm {

// The staging area, in every rank's head after Control.
inline constexpr int kSlots = 2;
inline constexpr int64_t kSlotBytes = 512 << 10;
inline constexpr int64_t kControlBytes =
    (static_cast<int64_t>(sizeof(Control)) + 4095) / 4096 * 4096;
inline constexpr int64_t kStagingBytes = 2 * kSlots * kSlotBytes;
static_assert(kStagingBytes == kShmStagingBytes);
inline constexpr int64_t kHeadBytes = kControlBytes + kStagingBytes;

// Columns [begin, begin + bytes) of all rows, and where they are staged.
struct Window {
  int64_t begin = 0;
  int64_t bytes = 0;
  int slot = 0;
  bool first = false;
  uint64_t number = 0;  // halves of windows before it, of all collectives
};

// One collective as this rank enters it.
struct Collective {
  using Reader = std::function<absl::Status(const Window&)>;
  Post post;
  const char* rows = nullptr;
  bool results = false;                 // windows have second halves
  bool fine = false;                    // no window is longer than a slot's
  bool bare = false;                    // rows are not staged: only results are
  std::function<absl::Status()> check;  // as soon as all posts are there
  Reader read;
  Reader read_results;
};

class Exchange {
 public:
  // Own pointers into the heap are direct. The team outlives this.
  explicit Exchange(Team* team);

  int rank() const { return team_->rank(); }
  int size() const { return team_->size(); }

  // What the ranks are called in messages, instead of 0, 1, ...; and the number
  // of the next collectives there, where it is not the team's own.
  void SetNames(std::vector<int> names) { names_ = std::move(names); }
  void SetNumber(int64_t number) { number_ = number; }
  int NameOf(int rank) const { return names_.empty() ? rank : names_[rank]; }

  // `numel` of `type`, and `what`, must be identical on all ranks.
  static Collective New(CollectiveOp op, absl::string_view what,
                        ElementType type, int64_t numel);
  // Sets what the other ranks may read: rows of these lengths, in bytes, one
  // after the other.
  void SetRows(Collective* call, const void* rows,
               absl::Span<const int64_t> lengths,
               bool may_be_direct = true) const;
  // Enters a collective, and leaves it when it is over. COLLECTIVE, blocking.
  absl::Status Run(Collective* call);

  // ---- for readers

  const Post& PostOf(int peer) const {
    return team_->of(peer).posts[sequence_ % 2];
  }
  static int64_t RowBytes(const Post& post, int row);
  // Ranks in an order that differs between readers: this one, the next one, ...
  int Peer(int i) const { return (rank() + i) % size(); }
  // Row `row` of rank `peer` in a window; waits until it may be read.
  absl::Status Row(int peer, int row, const Window& window, const char** data,
                   int64_t* bytes);
  // Copies that row, in a window, to where it lies in the row at `to`.
  absl::Status CopyRow(int peer, int row, const Window& window, char* to);
  // Folds row `row` of all ranks into `out`.
  absl::Status Fold(int row, const Window& window, ReduceOp op, char* out);
  // Where rank `peer` has its results of a window, which begin as a row does:
  // in its own row if that is direct, else in the staging area.
  const char* ResultOf(int peer, const Window& window) const;
  char* ResultSlot(int peer, const Window& window) const;
  absl::Status WaitForResult(int peer, const Window& window) {
    return team_->WaitFor(peer, &Control::ready, window.number + 2);
  }

  // Windows that were read where they lay, and that were staged first; for
  // tests and logs.
  int64_t direct_windows() const { return direct_windows_; }
  int64_t staged_windows() const { return staged_windows_; }

 private:
  absl::Status RunToTheEnd(Collective* call);
  absl::Status CheckNobodyGaveUp() const;
  absl::Status CheckPosts() const;
  absl::Status WaitForAll(Control::Counter Control::*counter, uint64_t value);
  Window FirstWindow(const Collective& call) const;
  absl::Status RunWindows(const Collective& call, Window window,
                          int64_t row_bytes);
  absl::Status TakeResults(const Collective& call, const Window& window);
  absl::Status WaitForSlot(const Window& window);
  absl::Status Stage(const Collective& call, const Window& window);

  Team* const team_;
  std::vector<int> names_;
  int64_t number_ = 0;     // 0: sequence_
  uint64_t sequence_ = 0;  // of the current collective
  uint64_t base_ = 0;      // windows' halves of the collectives before it
  uint64_t windows_ = 0;   // windows of the collectives before it
  // When every rank's `taken` has reached it, the slot is free.
  uint64_t slot_free_[kSlots] = {};
  int64_t direct_windows_ = 0, staged_windows_ = 0;
};

}  // namespace tessera::shm
#endif  // COMM_SHM_EXCHANGE_H_
