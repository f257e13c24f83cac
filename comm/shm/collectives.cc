#include "comm/shm/collectives.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace tessera::shm {
namespace {

// Up to here each rank sums the whole of an all-reduce for itself: what that
// costs is less than to wait for the others a second time. Its rows are staged,
// since sums are written where the others would still read.
constexpr int64_t kFoldAllBytes = 64 << 10;

}  // namespace

absl::Status Collectives::AllGather(absl::string_view what, const void* in,
                                    void* out, int64_t bytes) {
  Collective call =
      Exchange::New(CollectiveOp::kAllGather, what, ElementType::kUInt8, bytes);
  exchange_.SetRows(&call, in, {bytes});
  call.read = [&](const Window& window) -> absl::Status {
    // The own place too: the others need not wait for that copy.
    for (int i = 0; i < exchange_.size(); ++i) {
      const int peer = exchange_.Peer(i);
      char* const place = static_cast<char*>(out) + peer * bytes;
      const char* data;
      int64_t n;
      TESSERA_RETURN_IF_ERROR(exchange_.Row(peer, 0, window, &data, &n));
      if (i == 0) {
        if (place == in) continue;
        data = static_cast<const char*>(in) + window.begin;
      }
      std::memcpy(place + window.begin, data, n);
    }
    return absl::OkStatus();
  };
  return exchange_.Run(&call);
}

absl::Status Collectives::ReduceScatter(absl::string_view what,
                                        ElementType type, ReduceOp op,
                                        const void* in, void* out,
                                        int64_t numel) {
  Collective call =
      Exchange::New(CollectiveOp::kReduceScatter, what, type, numel);
  exchange_.SetRows(
      &call, in,
      std::vector<int64_t>(exchange_.size(), numel * ElementBytes(type)));
  call.read = [&](const Window& window) {
    return exchange_.Fold(exchange_.rank(), window, op,
                          static_cast<char*>(out) + window.begin);
  };
  return exchange_.Run(&call);
}

// Each rank sums its row of `data`; then all read the others' sums. A rank that
// is direct sums in place: in the first half nobody else reads its own row of
// its tensor. In the second half it overwrites its other rows, each window when
// the sum of that window is there, and so has read all that it is made of.
absl::Status Collectives::SumInTwoHalves(Collective* call, char* data,
                                         int64_t numel) {
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
  call->read = [this, data, rank, &post](const Window& window) {
    return exchange_.Fold(rank, window, ReduceOp::kSum,
                          post.direct_offset >= 0
                              ? data + post.row_begin[rank] + window.begin
                              : exchange_.ResultSlot(rank, window));
  };
  call->read_results = [this, data, rank,
                        &post](const Window& window) -> absl::Status {
    for (int i = 0; i < exchange_.size(); ++i) {
      const int peer = exchange_.Peer(i);
      const int64_t n = std::clamp<int64_t>(
          Exchange::RowBytes(post, peer) - window.begin, 0, window.bytes);
      char* const to = data + post.row_begin[peer] + window.begin;
      const char* const from = exchange_.ResultOf(peer, window);
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
                                    void* data, int64_t numel) {
  Collective call = Exchange::New(CollectiveOp::kAllReduce, what, type, numel);
  char* const all = static_cast<char*>(data);
  const int64_t bytes = numel * ElementBytes(type);
  if (bytes > kFoldAllBytes) return SumInTwoHalves(&call, all, numel);
  exchange_.SetRows(&call, data, {bytes}, /*may_be_direct=*/false);
  call.read = [&](const Window& window) {
    return exchange_.Fold(0, window, ReduceOp::kSum, all + window.begin);
  };
  return exchange_.Run(&call);
}

absl::Status Collectives::Broadcast(absl::string_view what, void* data,
                                    int64_t bytes, int root) {
  Collective call =
      Exchange::New(CollectiveOp::kBroadcast, what, ElementType::kUInt8, bytes);
  call.post.root = root;
  const bool is_root = exchange_.rank() == root;
  exchange_.SetRows(&call, data, {is_root ? bytes : 0});
  if (!is_root) {
    call.read = [&](const Window& window) {
      return exchange_.CopyRow(root, 0, window, static_cast<char*>(data));
    };
  }
  return exchange_.Run(&call);
}

absl::Status Collectives::MoveParts(absl::string_view what, CollectiveOp op,
                                    const std::vector<const char*>& in,
                                    const std::vector<char*>& out,
                                    int64_t bytes) {
  Collective call = Exchange::New(op, what, ElementType::kUInt8, bytes);
  const char* begin = nullptr;
  std::vector<int64_t> lengths;
  for (const char* part : in) {
    if (begin == nullptr) begin = part;
    lengths.push_back(part == nullptr ? 0 : bytes);
  }
  exchange_.SetRows(&call, begin, lengths);
  call.check = [&]() -> absl::Status {
    for (int peer = 0; peer < exchange_.size(); ++peer) {
      const int64_t sent =
          Exchange::RowBytes(exchange_.PostOf(peer), exchange_.rank());
      const int64_t expected = out[peer] == nullptr ? 0 : bytes;
      if (sent == expected) continue;
      return absl::FailedPreconditionError(
          absl::StrCat(what, ": rank ", exchange_.NameOf(peer), " sends ", sent,
                       " bytes to rank ", exchange_.NameOf(exchange_.rank()),
                       ", which expects ", expected));
    }
    return absl::OkStatus();
  };
  call.read = [&](const Window& window) -> absl::Status {
    for (int i = 0; i < exchange_.size(); ++i) {
      const int peer = exchange_.Peer(i);
      if (out[peer] == nullptr) continue;
      TESSERA_RETURN_IF_ERROR(
          exchange_.CopyRow(peer, exchange_.rank(), window, out[peer]));
    }
    return absl::OkStatus();
  };
  return exchange_.Run(&call);
}

absl::Status Collectives::Barrier(absl::string_view what) {
  Collective call =
      Exchange::New(CollectiveOp::kBarrier, what, ElementType::kUInt8, 0);
  exchange_.SetRows(&call, nullptr, {0});
  return exchange_.Run(&call);
}

absl::Status Collectives::AllGatherTexts(absl::string_view what,
                                         absl::string_view mine,
                                         std::vector<std::string>* texts) {
  Collective call =
      Exchange::New(CollectiveOp::kText, what, ElementType::kUInt8, 0);
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
      const int peer = exchange_.Peer(i);
      TESSERA_RETURN_IF_ERROR(
          exchange_.CopyRow(peer, 0, window, (*texts)[peer].data()));
    }
    return absl::OkStatus();
  };
  return exchange_.Run(&call);
}

}  // namespace tessera::shm
