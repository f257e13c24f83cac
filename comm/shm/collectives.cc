#include "comm/shm/collectives.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace tessera::shm {
namespace {

// Up to here each rank folds the whole of an all-reduce for itself.
constexpr int64_t kFoldAllBytes = 64 << 10;

std::vector<void*> Rows(void* data, int64_t bytes, int count) {
  std::vector<void*> rows;
  for (int i = 0; i < count; ++i) {
    rows.push_back(static_cast<char*>(data) + i * bytes);
  }
  return rows;
}

}  // namespace

absl::Status Collectives::AllGather(absl::string_view what, const void* in,
                                    void* out, int64_t bytes) {
  return AllGather(what, in, Rows(out, bytes, exchange_.size()), bytes);
}

absl::Status Collectives::AllGather(absl::string_view what, const void* in,
                                    absl::Span<void* const> places,
                                    int64_t bytes) {
  Collective call =
      Exchange::New(Op::kAllGather, what, ElementType::kUInt8, bytes);
  exchange_.SetRows(&call, in, {bytes});
  call.read = [&](const Window& window) -> absl::Status {
    // The own part too: the others need not wait for that copy.
    for (int i = 0; i < exchange_.size(); ++i) {
      const int peer = exchange_.Peer(i);
      const char* data;
      int64_t n;
      TESSERA_RETURN_IF_ERROR(exchange_.Row(peer, 0, window, &data, &n));
      if (i == 0) {
        if (places[peer] == in) continue;
        data = static_cast<const char*>(in) + window.begin;
      }
      std::memcpy(static_cast<char*>(places[peer]) + window.begin, data, n);
    }
    return absl::OkStatus();
  };
  return exchange_.Run(&call);
}

absl::Status Collectives::ReduceScatter(absl::string_view what,
                                        ElementType type, ReduceOp op,
                                        const void* in, void* out,
                                        int64_t numel, bool averages) {
  Collective call = Exchange::New(Op::kReduceScatter, what, type, numel);
  const ReduceOp mine = averages ? ReduceOp::kAverage : op;
  call.post.reduce = op;
  exchange_.SetRows(
      &call, in,
      std::vector<int64_t>(exchange_.size(), numel * ElementBytes(type)));
  call.read = [&](const Window& window) {
    int64_t n;
    return exchange_.Fold(exchange_.rank(), window, mine,
                          static_cast<char*>(out) + window.begin, &n);
  };
  return exchange_.Run(&call);
}

// Each rank folds its row of `data`; then all (kAllReduce) or the root
// (kReduce) read the folded rows.
absl::Status Collectives::ReduceInTwoHalves(Collective* call, char* data,
                                            int64_t numel, bool wanted) {
  const int size = exchange_.size();
  const int rank = exchange_.rank();
  const int64_t each = (numel + size - 1) / size;
  std::vector<int64_t> lengths;
  for (int r = 0; r < size; ++r) {
    lengths.push_back(std::clamp<int64_t>(numel - r * each, 0, each) *
                      ElementBytes(call->post.type));
  }
  exchange_.SetRows(call, data, lengths);
  call->results = true;
  const Post& post = call->post;
  // Where a rank's own tensor is direct, it is also where its sums are.
  const bool in_place = post.op == Op::kAllReduce;
  // Otherwise they go through the staging area always.
  call->fine = !in_place;
  call->read = [this, data, rank, in_place, &post](const Window& window) {
    int64_t n;
    return exchange_.Fold(rank, window, post.reduce,
                          in_place && post.direct_offset >= 0
                              ? data + post.row_begin[rank] + window.begin
                              : exchange_.ResultSlot(rank, window),
                          &n);
  };
  if (!wanted) return exchange_.Run(call);
  call->read_results = [this, data, in_place, rank,
                        &post](const Window& window) -> absl::Status {
    for (int i = 0; i < exchange_.size(); ++i) {
      const int peer = exchange_.Peer(i);
      const int64_t n = std::clamp<int64_t>(
          Exchange::RowBytes(post, peer) - window.begin, 0, window.bytes);
      char* const to = data + post.row_begin[peer] + window.begin;
      const char* const from = exchange_.ResultOf(peer, window, in_place);
      if (n == 0 || from == to) continue;
      if (peer != rank) {
        TESSERA_RETURN_IF_ERROR(exchange_.WaitForResult(peer, window));
      }
      std::memcpy(to, from, n);
    }
    return absl::OkStatus();
  };
  return exchange_.Run(call);
}

absl::Status Collectives::AllReduce(absl::string_view what, ElementType type,
                                    ReduceOp op, void* data, int64_t numel) {
  Collective call = Exchange::New(Op::kAllReduce, what, type, numel);
  call.post.reduce = op;
  char* const all = static_cast<char*>(data);
  const int64_t bytes = numel * ElementBytes(type);
  if (bytes > kFoldAllBytes) {
    return ReduceInTwoHalves(&call, all, numel, /*wanted=*/true);
  }
  exchange_.SetRows(&call, data, {bytes}, /*may_be_direct=*/false);
  call.read = [&](const Window& window) {
    int64_t n;
    return exchange_.Fold(0, window, op, all + window.begin, &n);
  };
  return exchange_.Run(&call);
}

absl::Status Collectives::Reduce(absl::string_view what, ElementType type,
                                 ReduceOp op, void* data, int64_t numel,
                                 int root) {
  Collective call = Exchange::New(Op::kReduce, what, type, numel);
  call.post.reduce = op;
  call.post.root = root;
  return ReduceInTwoHalves(&call, static_cast<char*>(data), numel,
                           exchange_.rank() == root);
}

absl::Status Collectives::Broadcast(absl::string_view what, void* data,
                                    int64_t bytes, int root) {
  Collective call =
      Exchange::New(Op::kBroadcast, what, ElementType::kUInt8, bytes);
  call.post.root = root;
  const bool is_root = exchange_.rank() == root;
  exchange_.SetRows(&call, data, {is_root ? bytes : 0});
  if (!is_root) {
    call.read = [&](const Window& window) -> absl::Status {
      const char* from;
      int64_t n;
      TESSERA_RETURN_IF_ERROR(exchange_.Row(root, 0, window, &from, &n));
      std::memcpy(static_cast<char*>(data) + window.begin, from, n);
      return absl::OkStatus();
    };
  }
  return exchange_.Run(&call);
}

absl::Status Collectives::Gather(absl::string_view what, const void* in,
                                 absl::Span<void* const> places, int64_t bytes,
                                 int root) {
  Collective call =
      Exchange::New(Op::kGather, what, ElementType::kUInt8, bytes);
  call.post.root = root;
  const bool is_root = exchange_.rank() == root;
  exchange_.SetRows(&call, in, {is_root ? 0 : bytes});
  if (is_root) {
    if (places[root] != in && bytes > 0) std::memmove(places[root], in, bytes);
    call.read = [&](const Window& window) -> absl::Status {
      for (int i = 1; i < exchange_.size(); ++i) {
        const int peer = exchange_.Peer(i);
        const char* from;
        int64_t n;
        TESSERA_RETURN_IF_ERROR(exchange_.Row(peer, 0, window, &from, &n));
        std::memcpy(static_cast<char*>(places[peer]) + window.begin, from, n);
      }
      return absl::OkStatus();
    };
  }
  return exchange_.Run(&call);
}

absl::Status Collectives::Scatter(absl::string_view what, const void* in,
                                  void* out, int64_t bytes, int root) {
  Collective call =
      Exchange::New(Op::kScatter, what, ElementType::kUInt8, bytes);
  call.post.root = root;
  const bool is_root = exchange_.rank() == root;
  exchange_.SetRows(
      &call, in, std::vector<int64_t>(exchange_.size(), is_root ? bytes : 0));
  if (is_root) {
    const char* const own = static_cast<const char*>(in) + root * bytes;
    if (own != out) std::memmove(out, own, bytes);
  } else {
    call.read = [&](const Window& window) -> absl::Status {
      const char* from;
      int64_t n;
      TESSERA_RETURN_IF_ERROR(
          exchange_.Row(root, exchange_.rank(), window, &from, &n));
      std::memcpy(static_cast<char*>(out) + window.begin, from, n);
      return absl::OkStatus();
    };
  }
  return exchange_.Run(&call);
}

absl::Status Collectives::AllToAll(absl::string_view what, const void* in,
                                   absl::Span<const int64_t> in_row_bytes,
                                   absl::Span<void* const> places,
                                   absl::Span<const int64_t> out_row_bytes) {
  const int rank = exchange_.rank();
  Collective call = Exchange::New(Op::kAllToAll, what, ElementType::kUInt8, 0);
  exchange_.SetRows(&call, in, in_row_bytes);
  std::copy(out_row_bytes.begin(), out_row_bytes.end(),
            call.post.expected_bytes);
  call.check = [&] { return CheckRowLengths(what); };
  const int64_t own = std::min(in_row_bytes[rank], out_row_bytes[rank]);
  if (own > 0) {
    std::memcpy(places[rank], call.rows + call.post.row_begin[rank], own);
  }
  call.read = [&](const Window& window) -> absl::Status {
    for (int i = 1; i < exchange_.size(); ++i) {
      const int peer = exchange_.Peer(i);
      const char* from;
      int64_t n;
      TESSERA_RETURN_IF_ERROR(exchange_.Row(peer, rank, window, &from, &n));
      if (n == 0) continue;
      std::memcpy(static_cast<char*>(places[peer]) + window.begin, from, n);
    }
    return absl::OkStatus();
  };
  return exchange_.Run(&call);
}

absl::Status Collectives::CheckRowLengths(absl::string_view what) const {
  for (int from = 0; from < exchange_.size(); ++from) {
    for (int to = 0; to < exchange_.size(); ++to) {
      const int64_t sent = Exchange::RowBytes(exchange_.PostOf(from), to);
      const int64_t expected = exchange_.PostOf(to).expected_bytes[from];
      if (sent == expected) continue;
      return absl::InvalidArgumentError(
          absl::StrCat(what, ": rank ", from, " sends ", sent,
                       " bytes to rank ", to, ", which expects ", expected));
    }
  }
  return absl::OkStatus();
}

absl::Status Collectives::Barrier(absl::string_view what) {
  Collective call = Exchange::New(Op::kBarrier, what, ElementType::kUInt8, 0);
  exchange_.SetRows(&call, nullptr, {0});
  return exchange_.Run(&call);
}

absl::Status Collectives::AllGatherTexts(absl::string_view what,
                                         absl::string_view mine,
                                         std::vector<std::string>* texts) {
  Collective call = Exchange::New(Op::kText, what, ElementType::kUInt8, 0);
  exchange_.SetRows(&call, mine.data(), {static_cast<int64_t>(mine.size())});
  texts->assign(exchange_.size(), "");
  (*texts)[exchange_.rank()] = std::string(mine);
  call.check = [&] {
    for (int i = 1; i < exchange_.size(); ++i) {
      (*texts)[exchange_.Peer(i)].resize(
          Exchange::RowBytes(exchange_.PostOf(exchange_.Peer(i)), 0));
    }
    return absl::OkStatus();
  };
  call.read = [&](const Window& window) -> absl::Status {
    for (int i = 1; i < exchange_.size(); ++i) {
      const char* from;
      int64_t n;
      TESSERA_RETURN_IF_ERROR(
          exchange_.Row(exchange_.Peer(i), 0, window, &from, &n));
      std::memcpy((*texts)[exchange_.Peer(i)].data() + window.begin, from, n);
    }
    return absl::OkStatus();
  };
  return exchange_.Run(&call);
}

}  // namespace tessera::shm
