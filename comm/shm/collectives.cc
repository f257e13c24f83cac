#include "comm/shm/collectives.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"

namespace tessera::shm {
namespace {

// Up to here each rank folds the whole of an all-reduce for itself.
constexpr int64_t kFoldAllBytes = 64 << 10;
// Windows begin at multiples of a cache line.
constexpr int64_t kLineBytes = 64;

// FNV-1a.
uint64_t Hash(absl::string_view text) {
  uint64_t hash = 14695981039346656037u;
  for (unsigned char c : text) hash = (hash ^ c) * 1099511628211u;
  return hash;
}

// What a rank is in, for a message: "all-reduce of unit a: 12 float32, sum".
std::string Describe(const Post& post) {
  std::string text(post.what);
  const char* const op = OpName(post.op);
  if (text.find(op) == std::string::npos) {
    text = text.empty() ? op : absl::StrCat(op, " '", text, "'");
  }
  if (post.numel > 0) {
    absl::StrAppend(&text, ": ", post.numel, " ", ElementTypeName(post.type));
  }
  if (post.op == Op::kReduceScatter || post.op == Op::kAllReduce ||
      post.op == Op::kReduce) {
    absl::StrAppend(&text, ", ", ReduceOpName(post.reduce));
  }
  if (post.op == Op::kBroadcast || post.op == Op::kReduce ||
      post.op == Op::kGather || post.op == Op::kScatter) {
    absl::StrAppend(&text, ", root ", post.root);
  }
  return text;
}

bool Alike(const Post& a, const Post& b) {
  return a.op == b.op && a.type == b.type && a.reduce == b.reduce &&
         a.root == b.root && a.numel == b.numel && a.what_hash == b.what_hash;
}

int64_t RowBytes(const Post& post, int row) {
  return row < post.num_rows ? post.row_begin[row + 1] - post.row_begin[row]
                             : 0;
}

int64_t LongestRow(const Post& post) {
  int64_t longest = 0;
  for (int row = 0; row < post.num_rows; ++row) {
    longest = std::max(longest, RowBytes(post, row));
  }
  return longest;
}

// Only what is used is written: a Post has room for kMaxRanks rows.
void CopyPost(const Post& from, Post* to) {
  std::memcpy(static_cast<void*>(to), &from, offsetof(Post, row_begin));
  std::copy_n(from.row_begin, from.num_rows + 1, to->row_begin);
  if (from.op == Op::kAllToAll) {
    std::copy_n(from.expected_bytes, from.num_rows, to->expected_bytes);
  }
}

}  // namespace

Collectives::Collectives(Team* team, int64_t heap_bytes)
    : team_(team), heap_bytes_(heap_bytes) {
  TESSERA_CHECK_LE(team->size(), kMaxRanks);
}

// ---- one collective

Collectives::Call Collectives::NewCall(Op op, absl::string_view what,
                                       ElementType type, int64_t numel) {
  Call call;
  call.post.op = op;
  call.post.type = type;
  call.post.numel = numel;
  call.post.what_hash = Hash(what);
  const size_t shown = std::min(what.size(), sizeof(call.post.what) - 1);
  std::memcpy(call.post.what, what.data(), shown);
  return call;
}

void Collectives::SetRows(Call* call, const void* rows,
                          absl::Span<const int64_t> lengths,
                          bool may_be_direct) {
  Post& post = call->post;
  call->rows = static_cast<const char*>(rows);
  post.num_rows = static_cast<int32_t>(lengths.size());
  for (size_t i = 0; i < lengths.size(); ++i) {
    post.row_begin[i + 1] = post.row_begin[i] + lengths[i];
  }
  const int64_t offset =
      reinterpret_cast<intptr_t>(rows) -
      reinterpret_cast<intptr_t>(team_->heap_of(team_->rank()));
  if (may_be_direct && offset >= 0 &&
      offset + post.row_begin[post.num_rows] <= heap_bytes_) {
    post.direct_offset = offset;
  }
}

absl::Status Collectives::WaitForAll(Control::Counter Control::*counter,
                                     uint64_t value) {
  for (int i = 1; i < team_->size(); ++i) {
    TESSERA_RETURN_IF_ERROR(team_->WaitFor(Peer(i), counter, value));
  }
  return absl::OkStatus();
}

absl::Status Collectives::CheckPosts() const {
  const Post& mine = PostOf(team_->rank());
  for (int r = 0; r < team_->size(); ++r) {
    if (Alike(mine, PostOf(r))) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "the ranks are in different collectives: this one in ", Describe(mine),
        " #", sequence_, ", rank ", r, " in ", Describe(PostOf(r)), " #",
        sequence_,
        "; all ranks must run the same collectives in the same order"));
  }
  return absl::OkStatus();
}

Collectives::Window Collectives::FirstWindow(const Call& call) const {
  Window window;
  const int64_t rows = std::max(call.post.num_rows, 1);
  window.bytes = kSlotBytes / rows / kLineBytes * kLineBytes;
  window.slot = static_cast<int>(windows_ % kSlots);
  window.first = true;
  window.number = base_;
  return window;
}

absl::Status Collectives::Run(Call* call) {
  ++sequence_;
  const Post& post = call->post;
  const Window window = FirstWindow(*call);
  const bool staged = post.direct_offset < 0;
  team_->SetEnd(sequence_, base_);
  if (staged) TESSERA_RETURN_IF_ERROR(Stage(*call, window));
  CopyPost(post, &team_->mine().posts[sequence_ % 2]);
  team_->Publish(&team_->mine().posted, sequence_);
  TESSERA_RETURN_IF_ERROR(WaitForAll(&Control::posted, sequence_));
  TESSERA_RETURN_IF_ERROR(CheckPosts());
  if (call->check) TESSERA_RETURN_IF_ERROR(call->check());

  int64_t longest = 0;
  // Sums of Reduce go through the staging area always.
  bool all_direct = post.op != Op::kReduce;
  for (int r = 0; r < team_->size(); ++r) {
    const int64_t row_bytes = LongestRow(PostOf(r));
    longest = std::max(longest, row_bytes);
    all_direct &= row_bytes == 0 || PostOf(r).direct_offset >= 0;
  }
  if (longest == 0) return absl::OkStatus();
  Window first = window;
  if (all_direct) first.bytes = longest;
  TESSERA_RETURN_IF_ERROR(RunWindows(*call, first, longest));
  // The others still read what is the caller's.
  if (!staged) TESSERA_RETURN_IF_ERROR(WaitForAll(&Control::taken, base_));
  return absl::OkStatus();
}

absl::Status Collectives::RunWindows(const Call& call, Window window,
                                     int64_t row_bytes) {
  const int64_t num_windows = (row_bytes + window.bytes - 1) / window.bytes;
  const uint64_t halves = call.results ? 2 : 1;
  const bool staged = call.post.direct_offset < 0;
  (staged ? staged_windows_ : direct_windows_) += num_windows;
  Control& mine = team_->mine();
  team_->SetEnd(sequence_, base_ + num_windows * halves);
  for (int64_t k = 0; k < num_windows; ++k) {
    if (k > 0) {
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
    if (call.results) {
      team_->Publish(&mine.ready, window.number + 2);
      if (call.read_results) {
        TESSERA_RETURN_IF_ERROR(call.read_results(window));
      }
    }
    team_->Publish(&mine.taken, window.number + halves);
  }
  base_ += num_windows * halves;
  windows_ += num_windows;
  return absl::OkStatus();
}

absl::Status Collectives::WaitForSlot(const Window& window) {
  return WaitForAll(&Control::taken, slot_free_[window.slot]);
}

absl::Status Collectives::Stage(const Call& call, const Window& window) {
  TESSERA_RETURN_IF_ERROR(WaitForSlot(window));
  char* slot =
      team_->head_of(team_->rank()) + kControlBytes + window.slot * kSlotBytes;
  for (int row = 0; row < call.post.num_rows; ++row) {
    const int64_t bytes =
        std::min(window.bytes, RowBytes(call.post, row) - window.begin);
    if (bytes <= 0) continue;
    std::memcpy(slot + row * window.bytes,
                call.rows + call.post.row_begin[row] + window.begin, bytes);
  }
  return absl::OkStatus();
}

absl::Status Collectives::Row(int peer, int row, const Window& window,
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

char* Collectives::ResultSlot(int peer, const Window& window) const {
  return team_->head_of(peer) + kControlBytes +
         (kSlots + window.slot) * kSlotBytes;
}

absl::Status Collectives::Fold(int row, const Window& window, char* out,
                               int64_t* bytes) {
  const void* sources[kMaxRanks];
  for (int r = 0; r < team_->size(); ++r) {
    const char* data;
    TESSERA_RETURN_IF_ERROR(Row(r, row, window, &data, bytes));
    sources[r] = data;
  }
  const Post& post = PostOf(team_->rank());
  ReduceInOrder(post.type, post.reduce, out, sources, team_->size(),
                *bytes / ElementBytes(post.type));
  return absl::OkStatus();
}

// ---- operations

absl::Status Collectives::AllGather(absl::string_view what, const void* in,
                                    void* out, int64_t bytes) {
  char* const to = static_cast<char*>(out);
  char* const own = to + team_->rank() * bytes;
  Call call = NewCall(Op::kAllGather, what, ElementType::kUInt8, bytes);
  SetRows(&call, in, {bytes});
  call.read = [&](const Window& window) -> absl::Status {
    // The own part too: the others need not wait for that copy.
    for (int i = 0; i < team_->size(); ++i) {
      const char* data;
      int64_t n;
      TESSERA_RETURN_IF_ERROR(Row(Peer(i), 0, window, &data, &n));
      char* const place = to + Peer(i) * bytes + window.begin;
      if (i > 0) {
        std::memcpy(place, data, n);
      } else if (own != in) {
        std::memcpy(place, static_cast<const char*>(in) + window.begin, n);
      }
    }
    return absl::OkStatus();
  };
  return Run(&call);
}

absl::Status Collectives::ReduceScatter(absl::string_view what,
                                        ElementType type, ReduceOp op,
                                        const void* in, void* out,
                                        int64_t numel) {
  Call call = NewCall(Op::kReduceScatter, what, type, numel);
  call.post.reduce = op;
  SetRows(&call, in,
          std::vector<int64_t>(team_->size(), numel * ElementBytes(type)));
  call.read = [&](const Window& window) {
    int64_t n;
    return Fold(team_->rank(), window, static_cast<char*>(out) + window.begin,
                &n);
  };
  return Run(&call);
}

// Each rank folds its row of `data`; then all (kAllReduce) or the root
// (kReduce) read the folded rows.
absl::Status Collectives::ReduceInTwoHalves(Call* call, char* data,
                                            int64_t numel, bool wanted) {
  const int size = team_->size();
  const int rank = team_->rank();
  const int64_t each = (numel + size - 1) / size;
  std::vector<int64_t> lengths;
  for (int r = 0; r < size; ++r) {
    lengths.push_back(std::clamp<int64_t>(numel - r * each, 0, each) *
                      ElementBytes(call->post.type));
  }
  SetRows(call, data, lengths);
  call->results = true;
  const Post& post = call->post;
  // Where a rank's own tensor is direct, it is also where its sums are.
  const bool in_place = post.op == Op::kAllReduce;
  call->read = [this, data, in_place, &post](const Window& window) {
    int64_t n;
    char* const own = data + post.row_begin[team_->rank()] + window.begin;
    char* const slot = ResultSlot(team_->rank(), window);
    const bool direct = in_place && post.direct_offset >= 0;
    TESSERA_RETURN_IF_ERROR(
        Fold(team_->rank(), window, direct ? own : slot, &n));
    return absl::OkStatus();
  };
  if (!wanted) return Run(call);
  call->read_results = [this, data, in_place, rank,
                        &post](const Window& window) -> absl::Status {
    for (int i = 0; i < team_->size(); ++i) {
      const int peer = Peer(i);
      const int64_t n = std::clamp<int64_t>(RowBytes(post, peer) - window.begin,
                                            0, window.bytes);
      if (n == 0) continue;
      const char* from = ResultSlot(peer, window);
      if (in_place && PostOf(peer).direct_offset >= 0) {
        from = team_->heap_of(peer) + PostOf(peer).direct_offset +
               post.row_begin[peer] + window.begin;
        if (peer == rank) continue;
      }
      if (peer != rank) {
        TESSERA_RETURN_IF_ERROR(
            team_->WaitFor(peer, &Control::ready, window.number + 2));
      }
      std::memcpy(data + post.row_begin[peer] + window.begin, from, n);
    }
    return absl::OkStatus();
  };
  return Run(call);
}

absl::Status Collectives::AllReduce(absl::string_view what, ElementType type,
                                    ReduceOp op, void* data, int64_t numel) {
  Call call = NewCall(Op::kAllReduce, what, type, numel);
  call.post.reduce = op;
  char* const all = static_cast<char*>(data);
  const int64_t bytes = numel * ElementBytes(type);
  if (bytes > kFoldAllBytes) {
    return ReduceInTwoHalves(&call, all, numel, /*wanted=*/true);
  }
  SetRows(&call, data, {bytes}, /*may_be_direct=*/false);
  call.read = [&](const Window& window) {
    int64_t n;
    return Fold(0, window, all + window.begin, &n);
  };
  return Run(&call);
}

absl::Status Collectives::Reduce(absl::string_view what, ElementType type,
                                 ReduceOp op, void* data, int64_t numel,
                                 int root) {
  Call call = NewCall(Op::kReduce, what, type, numel);
  call.post.reduce = op;
  call.post.root = root;
  return ReduceInTwoHalves(&call, static_cast<char*>(data), numel,
                           team_->rank() == root);
}

absl::Status Collectives::Broadcast(absl::string_view what, void* data,
                                    int64_t bytes, int root) {
  Call call = NewCall(Op::kBroadcast, what, ElementType::kUInt8, bytes);
  call.post.root = root;
  const bool is_root = team_->rank() == root;
  SetRows(&call, data, {is_root ? bytes : 0});
  if (!is_root) {
    call.read = [&](const Window& window) -> absl::Status {
      const char* from;
      int64_t n;
      TESSERA_RETURN_IF_ERROR(Row(root, 0, window, &from, &n));
      std::memcpy(static_cast<char*>(data) + window.begin, from, n);
      return absl::OkStatus();
    };
  }
  return Run(&call);
}

absl::Status Collectives::Gather(absl::string_view what, const void* in,
                                 void* out, int64_t bytes, int root) {
  Call call = NewCall(Op::kGather, what, ElementType::kUInt8, bytes);
  call.post.root = root;
  const bool is_root = team_->rank() == root;
  char* const to = static_cast<char*>(out);
  if (is_root && to + root * bytes != in) {
    std::memmove(to + root * bytes, in, bytes);
  }
  SetRows(&call, in, {is_root ? 0 : bytes});
  if (is_root) {
    call.read = [&](const Window& window) -> absl::Status {
      for (int i = 1; i < team_->size(); ++i) {
        const char* from;
        int64_t n;
        TESSERA_RETURN_IF_ERROR(Row(Peer(i), 0, window, &from, &n));
        std::memcpy(to + Peer(i) * bytes + window.begin, from, n);
      }
      return absl::OkStatus();
    };
  }
  return Run(&call);
}

absl::Status Collectives::Scatter(absl::string_view what, const void* in,
                                  void* out, int64_t bytes, int root) {
  Call call = NewCall(Op::kScatter, what, ElementType::kUInt8, bytes);
  call.post.root = root;
  const bool is_root = team_->rank() == root;
  SetRows(&call, in, std::vector<int64_t>(team_->size(), is_root ? bytes : 0));
  if (is_root) {
    const char* const own = static_cast<const char*>(in) + root * bytes;
    if (own != out) std::memmove(out, own, bytes);
  } else {
    call.read = [&](const Window& window) -> absl::Status {
      const char* from;
      int64_t n;
      TESSERA_RETURN_IF_ERROR(Row(root, team_->rank(), window, &from, &n));
      std::memcpy(static_cast<char*>(out) + window.begin, from, n);
      return absl::OkStatus();
    };
  }
  return Run(&call);
}

absl::Status Collectives::AllToAll(absl::string_view what, const void* in,
                                   absl::Span<const int64_t> in_row_bytes,
                                   void* out,
                                   absl::Span<const int64_t> out_row_bytes) {
  const int rank = team_->rank();
  Call call = NewCall(Op::kAllToAll, what, ElementType::kUInt8, 0);
  SetRows(&call, in, in_row_bytes);
  std::copy(out_row_bytes.begin(), out_row_bytes.end(),
            call.post.expected_bytes);
  call.check = [&]() -> absl::Status {
    for (int from = 0; from < team_->size(); ++from) {
      for (int to = 0; to < team_->size(); ++to) {
        const int64_t sent = RowBytes(PostOf(from), to);
        const int64_t expected = PostOf(to).expected_bytes[from];
        if (sent == expected) continue;
        return absl::InvalidArgumentError(
            absl::StrCat(what, ": rank ", from, " sends ", sent,
                         " bytes to rank ", to, ", which expects ", expected));
      }
    }
    return absl::OkStatus();
  };
  std::vector<char*> places;
  char* place = static_cast<char*>(out);
  for (int64_t bytes : out_row_bytes) {
    places.push_back(place);
    place += bytes;
  }
  std::memcpy(places[rank], call.rows + call.post.row_begin[rank],
              std::min(in_row_bytes[rank], out_row_bytes[rank]));
  call.read = [&](const Window& window) -> absl::Status {
    for (int i = 1; i < team_->size(); ++i) {
      const char* from;
      int64_t n;
      TESSERA_RETURN_IF_ERROR(Row(Peer(i), rank, window, &from, &n));
      std::memcpy(places[Peer(i)] + window.begin, from, n);
    }
    return absl::OkStatus();
  };
  return Run(&call);
}

absl::Status Collectives::Barrier(absl::string_view what) {
  Call call = NewCall(Op::kBarrier, what, ElementType::kUInt8, 0);
  SetRows(&call, nullptr, {0});
  return Run(&call);
}

absl::Status Collectives::AllGatherTexts(absl::string_view what,
                                         absl::string_view mine,
                                         std::vector<std::string>* texts) {
  Call call = NewCall(Op::kText, what, ElementType::kUInt8, 0);
  SetRows(&call, mine.data(), {static_cast<int64_t>(mine.size())});
  texts->assign(team_->size(), "");
  (*texts)[team_->rank()] = std::string(mine);
  call.check = [&] {
    for (int i = 1; i < team_->size(); ++i) {
      (*texts)[Peer(i)].resize(RowBytes(PostOf(Peer(i)), 0));
    }
    return absl::OkStatus();
  };
  call.read = [&](const Window& window) -> absl::Status {
    for (int i = 1; i < team_->size(); ++i) {
      const char* from;
      int64_t n;
      TESSERA_RETURN_IF_ERROR(Row(Peer(i), 0, window, &from, &n));
      std::memcpy((*texts)[Peer(i)].data() + window.begin, from, n);
    }
    return absl::OkStatus();
  };
  return Run(&call);
}

}  // namespace tessera::shm
