#include "comm/shm/exchange.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/bits.h"
#include "base/check.h"
#include "base/status.h"
#include "comm/mismatch_hint.h"

// Why it is so. Ranks share memory and no lock, so three things must hold.
//
// Nobody reads what is not there yet: a window is published (`posted`, `ready`)
// after it is staged. Posts are compared before any row is read: ranks in
// different collectives would read rows of other lengths, past their ends.
//
// Nobody writes what others still read: a slot is staged again only when every
// rank has taken (`taken`) what lay there, and a rank whose own memory is read
// where it lies leaves only when all have taken its last window, since its
// caller may write there at once.
//
// A rank that fails must leave at once: it cannot wait for others, which may
// wait for it. So what they read of it may be overwritten meanwhile; it says so
// first (`broken`), and whoever has read looks at that flag after its last
// read: either it sees the flag, and fails too, or its reads came before the
// writes. Without that a rank would return a wrong result as a good one.
namespace tessera::shm {
namespace {

// Windows begin at multiples of a cache line.
constexpr int64_t kLineBytes = 64;

// What a rank is in, for a message: "all-reduce of unit a: 12 float32, sum".
std::string Describe(const Post& post) {
  std::string text(post.what);
  const std::string op(CollectiveName(post.op));
  if (text.find(op) == std::string::npos) {
    text = text.empty() ? op : absl::StrCat(op, " '", text, "'");
  }
  if (post.numel > 0) {
    absl::StrAppend(&text, ": ", post.numel, " ", ElementTypeName(post.type));
  }
  if (TraitsOf(post.op).sums) absl::StrAppend(&text, ", sum");
  if (post.op == CollectiveOp::kBroadcast)
    absl::StrAppend(&text, ", root ", post.root);
  return text;
}

bool SameCollective(const Post& a, const Post& b) {
  return a.op == b.op && a.type == b.type && a.root == b.root &&
         a.numel == b.numel && a.what_hash == b.what_hash;
}

int64_t LongestRow(const Post& post) {
  int64_t longest = 0;
  for (int row = 0; row < post.num_rows; ++row) {
    longest = std::max(longest, Exchange::RowBytes(post, row));
  }
  return longest;
}

// Only what is used is written: a Post has room for kMaxRanks rows.
void CopyPost(const Post& from, Post* to) {
  std::memcpy(static_cast<void*>(to), &from, offsetof(Post, row_begin));
  std::copy_n(from.row_begin, from.num_rows + 1, to->row_begin);
}

}  // namespace

Exchange::Exchange(Team* team) : team_(team) {
  TESSERA_CHECK_LE(team->size(), kMaxRanks);
}

Collective Exchange::New(CollectiveOp op, absl::string_view what,
                         ElementType type, int64_t numel) {
  Collective call;
  call.post.op = op;
  call.post.type = type;
  call.post.numel = numel;
  call.post.what_hash =
      Fingerprint(what.data(), static_cast<int64_t>(what.size()));
  const size_t shown = std::min(what.size(), sizeof(call.post.what) - 1);
  std::memcpy(call.post.what, what.data(), shown);
  return call;
}

void Exchange::SetRows(Collective* call, const void* rows,
                       absl::Span<const int64_t> lengths,
                       bool may_be_direct) const {
  Post& post = call->post;
  call->rows = static_cast<const char*>(rows);
  post.num_rows = static_cast<int32_t>(lengths.size());
  for (size_t i = 0; i < lengths.size(); ++i) {
    post.row_begin[i + 1] = post.row_begin[i] + lengths[i];
  }
  if (may_be_direct) {
    post.direct_offset =
        team_->OffsetInHeap(rows, post.row_begin[post.num_rows]);
  }
}

int64_t Exchange::RowBytes(const Post& post, int row) {
  return row < post.num_rows ? post.row_begin[row + 1] - post.row_begin[row]
                             : 0;
}

absl::Status Exchange::WaitForAll(Control::Counter Control::*counter,
                                  uint64_t value) {
  for (int i = 1; i < size(); ++i) {
    TESSERA_RETURN_IF_ERROR(team_->WaitFor(Peer(i), counter, value));
  }
  return absl::OkStatus();
}

absl::Status Exchange::CheckPosts() const {
  const Post& mine = PostOf(rank());
  const int64_t number =
      number_ > 0 ? number_ : static_cast<int64_t>(sequence_);
  for (int r = 0; r < size(); ++r) {
    if (SameCollective(mine, PostOf(r))) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "the ranks are in different collectives: this one in ", Describe(mine),
        " #", number, ", rank ", NameOf(r), " in ", Describe(PostOf(r)), " #",
        number, MismatchHint(mine.what, PostOf(r).what)));
  }
  return absl::OkStatus();
}

Window Exchange::FirstWindow(const Collective& call) const {
  Window window;
  const int64_t rows = std::max(call.post.num_rows, 1);
  window.bytes = kSlotBytes / rows / kLineBytes * kLineBytes;
  window.slot = static_cast<int>(windows_ % kSlots);
  window.first = true;
  window.number = base_;
  return window;
}

absl::Status Exchange::Run(Collective* call) {
  ++sequence_;
  absl::Status status = team_->aborted();
  if (status.ok()) status = RunToTheEnd(call);
  if (status.ok()) status = CheckNobodyGaveUp();
  auto& broken = team_->mine().broken.value;
  if (!status.ok() && broken.load() == 0) {
    broken.store(sequence_);
    // Before the caller may write to what others still read: a store alone,
    // also a sequentially consistent one, comes after what stands above it, not
    // before what stands below. That fence and CheckNobodyGaveUp's are a pair.
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  return status;
}

absl::Status Exchange::CheckNobodyGaveUp() const {
  // What was read of a rank before its flag was up was what it meant.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int r = 0; r < size(); ++r) {
    const uint64_t broken = team_->of(r).broken.value.load();
    if (broken == 0 || broken > sequence_) continue;
    return absl::UnavailableError(absl::StrCat(
        "rank ", NameOf(r),
        " has given this collective up, so its result may be wrong"));
  }
  return absl::OkStatus();
}

absl::Status Exchange::RunToTheEnd(Collective* call) {
  const Post& post = call->post;
  const Window window = FirstWindow(*call);
  const bool staged = post.direct_offset < 0;
  if (staged) TESSERA_RETURN_IF_ERROR(Stage(*call, window));
  CopyPost(post, &team_->mine().posts[sequence_ % 2]);
  team_->Publish(&team_->mine().posted, sequence_);
  TESSERA_RETURN_IF_ERROR(WaitForAll(&Control::posted, sequence_));
  TESSERA_RETURN_IF_ERROR(CheckPosts());
  if (call->check) TESSERA_RETURN_IF_ERROR(call->check());

  int64_t longest = 0;
  bool all_direct = !call->fine;
  for (int r = 0; r < size(); ++r) {
    const int64_t row_bytes = LongestRow(PostOf(r));
    longest = std::max(longest, row_bytes);
    all_direct &= row_bytes == 0 || PostOf(r).direct_offset >= 0;
  }
  if (longest == 0) return absl::OkStatus();
  Window first = window;
  // Sums are read while they are in the caches.
  if (all_direct) {
    first.bytes = call->results ? std::min(longest, kSlotBytes) : longest;
  }
  TESSERA_RETURN_IF_ERROR(RunWindows(*call, first, longest));
  // The others still read what is the caller's.
  if (!staged) TESSERA_RETURN_IF_ERROR(WaitForAll(&Control::taken, base_));
  return absl::OkStatus();
}

absl::Status Exchange::RunWindows(const Collective& call, Window window,
                                  int64_t row_bytes) {
  const int64_t num_windows = (row_bytes + window.bytes - 1) / window.bytes;
  const uint64_t halves = call.results ? 2 : 1;
  const bool staged = call.post.direct_offset < 0;
  (staged ? staged_windows_ : direct_windows_) += num_windows;
  Control& mine = team_->mine();
  // Results are read one window late: by then the others have theirs too.
  Window before;
  for (int64_t k = 0; k < num_windows; ++k) {
    if (k > 0) {
      before = window;
      window.begin += window.bytes;
      window.slot = static_cast<int>((windows_ + k) % kSlots);
      window.first = false;
      window.number += halves;
      if (staged) {
        TESSERA_RETURN_IF_ERROR(Stage(call, window));
        team_->Publish(&mine.ready, window.number + 1);
      }
    }
    // Sums are staged too.
    if (call.results) TESSERA_RETURN_IF_ERROR(WaitForSlot(window));
    slot_free_[window.slot] = window.number + halves;
    if (call.read) TESSERA_RETURN_IF_ERROR(call.read(window));
    if (!call.results) {
      team_->Publish(&mine.taken, window.number + 1);
      continue;
    }
    team_->Publish(&mine.ready, window.number + 2);
    if (k > 0) TESSERA_RETURN_IF_ERROR(TakeResults(call, before));
  }
  if (call.results) TESSERA_RETURN_IF_ERROR(TakeResults(call, window));
  base_ += num_windows * halves;
  windows_ += num_windows;
  return absl::OkStatus();
}

absl::Status Exchange::TakeResults(const Collective& call,
                                   const Window& window) {
  if (call.read_results) TESSERA_RETURN_IF_ERROR(call.read_results(window));
  team_->Publish(&team_->mine().taken, window.number + 2);
  return absl::OkStatus();
}

absl::Status Exchange::WaitForSlot(const Window& window) {
  return WaitForAll(&Control::taken, slot_free_[window.slot]);
}

absl::Status Exchange::Stage(const Collective& call, const Window& window) {
  TESSERA_RETURN_IF_ERROR(WaitForSlot(window));
  if (call.bare) return absl::OkStatus();
  char* slot =
      team_->head_of(rank()) + kControlBytes + window.slot * kSlotBytes;
  for (int row = 0; row < call.post.num_rows; ++row) {
    const int64_t bytes =
        std::min(window.bytes, RowBytes(call.post, row) - window.begin);
    if (bytes <= 0) continue;
    std::memcpy(slot + row * window.bytes,
                call.rows + call.post.row_begin[row] + window.begin, bytes);
  }
  return absl::OkStatus();
}

absl::Status Exchange::Row(int peer, int row, const Window& window,
                           const char** data, int64_t* bytes) {
  const Post& post = PostOf(peer);
  *bytes =
      std::clamp<int64_t>(RowBytes(post, row) - window.begin, 0, window.bytes);
  if (post.direct_offset >= 0) {
    *data = team_->heap_of(peer) + post.direct_offset + post.row_begin[row] +
            window.begin;
    return absl::OkStatus();
  }
  *data = team_->head_of(peer) + kControlBytes + window.slot * kSlotBytes +
          row * window.bytes;
  // The first window was staged before the post.
  if (window.first || *bytes == 0) return absl::OkStatus();
  return team_->WaitFor(peer, &Control::ready, window.number + 1);
}

const char* Exchange::ResultOf(int peer, const Window& window) const {
  const Post& post = PostOf(peer);
  if (post.direct_offset < 0) return ResultSlot(peer, window);
  return team_->heap_of(peer) + post.direct_offset + post.row_begin[peer] +
         window.begin;
}

char* Exchange::ResultSlot(int peer, const Window& window) const {
  return team_->head_of(peer) + kControlBytes +
         (kSlots + window.slot) * kSlotBytes;
}

absl::Status Exchange::CopyRow(int peer, int row, const Window& window,
                               char* to) {
  const char* data;
  int64_t bytes;
  TESSERA_RETURN_IF_ERROR(Row(peer, row, window, &data, &bytes));
  std::memcpy(to + window.begin, data, bytes);
  return absl::OkStatus();
}

absl::Status Exchange::Fold(int row, const Window& window, ReduceOp op,
                            char* out) {
  const void* sources[kMaxRanks];
  int64_t bytes = 0;
  for (int r = 0; r < size(); ++r) {
    const char* data;
    TESSERA_RETURN_IF_ERROR(Row(r, row, window, &data, &bytes));
    sources[r] = data;
  }
  const ElementType type = PostOf(rank()).type;
  ReduceInOrder(type, op, out, sources, size(), bytes / ElementBytes(type));
  return absl::OkStatus();
}

}  // namespace tessera::shm
