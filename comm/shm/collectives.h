// Collectives: all operations of a Team, on plain memory.
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
// A rank leaves when nobody reads its own memory any more. If the windows' sums
// are to go to several ranks (all-reduce, reduce), each window has a second
// half: the rank that summed its row lets the others read the sum.
//
// Sums run in rank order, for every size, window and alignment.
//
// Errors, all final for the team: FailedPrecondition (ranks in different
// collectives; says both), and what Team::WaitFor returns.
//
// Threads: one at a time. All calls are COLLECTIVE and blocking.
#ifndef COMM_SHM_COLLECTIVES_H_
#define COMM_SHM_COLLECTIVES_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "comm/shm/reduce.h"
#include "comm/shm/team.h"

namespace tessera::shm {

// The staging area, in every rank's head after Control.
inline constexpr int kSlots = 2;
inline constexpr int64_t kSlotBytes = 512 << 10;
inline constexpr int64_t kControlBytes =
    (static_cast<int64_t>(sizeof(Control)) + 4095) / 4096 * 4096;
inline constexpr int64_t kStagingBytes = 2 * kSlots * kSlotBytes;
inline constexpr int64_t kHeadBytes = kControlBytes + kStagingBytes;

class Collectives {
 public:
  // `heap_bytes`: how much of each rank's heap the others can read; own
  // pointers into it are direct. The team outlives this.
  Collectives(Team* team, int64_t heap_bytes);

  // out[p] = rank p's `in`, `bytes` each. `in` may be the own part of `out`.
  absl::Status AllGather(absl::string_view what, const void* in, void* out,
                         int64_t bytes);
  // out = fold over ranks p of p's in[rank * numel ...]. `out` may be the own
  // part of `in`.
  absl::Status ReduceScatter(absl::string_view what, ElementType type,
                             ReduceOp op, const void* in, void* out,
                             int64_t numel);
  absl::Status AllReduce(absl::string_view what, ElementType type, ReduceOp op,
                         void* data, int64_t numel);
  // `data` of the root only is written.
  absl::Status Reduce(absl::string_view what, ElementType type, ReduceOp op,
                      void* data, int64_t numel, int root);
  absl::Status Broadcast(absl::string_view what, void* data, int64_t bytes,
                         int root);
  // `out`, [W * bytes], on the root only.
  absl::Status Gather(absl::string_view what, const void* in, void* out,
                      int64_t bytes, int root);
  // `in`, [W * bytes], on the root only.
  absl::Status Scatter(absl::string_view what, const void* in, void* out,
                       int64_t bytes, int root);
  // Row p of `in` goes to rank p; row p of `out` comes from rank p. Rows lie
  // one after the other. InvalidArgument, on all ranks, if a rank's row for
  // another is not as long as that one expects.
  absl::Status AllToAll(absl::string_view what, const void* in,
                        absl::Span<const int64_t> in_row_bytes, void* out,
                        absl::Span<const int64_t> out_row_bytes);
  absl::Status Barrier(absl::string_view what);
  // By rank; lengths may differ.
  absl::Status AllGatherTexts(absl::string_view what, absl::string_view mine,
                              std::vector<std::string>* texts);

  // Windows that were read where they lay, and that were staged first; for
  // tests and logs.
  int64_t direct_windows() const { return direct_windows_; }
  int64_t staged_windows() const { return staged_windows_; }

 private:
  // Columns [begin, begin + bytes) of all rows, and where they are staged.
  struct Window {
    int64_t begin = 0;
    int64_t bytes = 0;
    int slot = 0;
    bool first = false;
    uint64_t number = 0;  // base_ + the halves before it
  };
  using Reader = std::function<absl::Status(const Window&)>;
  struct Call {
    Post post;
    const char* rows = nullptr;
    bool results = false;                 // windows have second halves
    std::function<absl::Status()> check;  // as soon as all posts are there
    Reader read;
    Reader read_results;
  };

  Call NewCall(Op op, absl::string_view what, ElementType type, int64_t numel);
  void SetRows(Call* call, const void* rows, absl::Span<const int64_t> lengths,
               bool may_be_direct = true);
  absl::Status Run(Call* call);
  absl::Status CheckPosts() const;
  absl::Status WaitForAll(Control::Counter Control::*counter, uint64_t value);
  Window FirstWindow(const Call& call) const;
  absl::Status RunWindows(const Call& call, Window window, int64_t row_bytes);
  absl::Status WaitForSlot(const Window& window);
  absl::Status Stage(const Call& call, const Window& window);

  // Row `row` of rank `peer` in a window; waits until it may be read.
  absl::Status Row(int peer, int row, const Window& window, const char** data,
                   int64_t* bytes);
  // Folds row `row` of all ranks into `out`.
  absl::Status Fold(int row, const Window& window, char* out, int64_t* bytes);
  absl::Status ReduceInTwoHalves(Call* call, char* data, int64_t numel,
                                 bool wanted);
  char* ResultSlot(int peer, const Window& window) const;

  const Post& PostOf(int peer) const {
    return team_->of(peer).posts[sequence_ % 2];
  }
  // Ranks in an order that differs between readers: the next one first.
  int Peer(int i) const { return (team_->rank() + i) % team_->size(); }

  Team* const team_;
  const int64_t heap_bytes_;
  uint64_t sequence_ = 0;  // of the current collective
  uint64_t base_ = 0;      // windows' halves of the collectives before it
  uint64_t windows_ = 0;   // windows of the collectives before it
  // When every rank's `taken` has reached it, the slot is free.
  uint64_t slot_free_[kSlots] = {};
  int64_t direct_windows_ = 0, staged_windows_ = 0;
};

}  // namespace tessera::shm
#endif  // COMM_SHM_COLLECTIVES_H_
