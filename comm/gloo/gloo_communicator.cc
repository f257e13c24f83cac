#include "comm/gloo/gloo_communicator.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/torch/divide.h"
#include "base/torch/tensor_over.h"
#include "base/torch_guard.h"
#include "comm/gloo/gloo_messages.h"
#include "comm/gloo/gloo_transport.h"
#include "comm/gloo/piece_buffers.h"
#include "comm/group/watched_communicator.h"
#include "comm/reduce/element_type.h"
#include "comm/reduce/slices.h"
#include "comm/transport_memory.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace tessera {
namespace {

using Message = GlooMessages::Message;

// An all-reduce up to here, over all ranks, is one exchange of everything.
constexpr int64_t kSingleExchangeBytes = 64 << 10;

class GlooCommunicator : public WatchedCommunicator {
 public:
  GlooCommunicator(const GlooCommunicatorOptions& options,
                   std::shared_ptr<FailureDomain> domain,
                   std::shared_ptr<GlooTransport> transport)
      : WatchedCommunicator(
            options, std::move(domain), [transport] { transport->Abort(); },
            TensorsSeen::kOnHost),
        messages_(std::move(transport),
                  {options.rank, options.world_size,
                   [this](int peer) { SetAwaited(peer); },
                   [this](int peer, absl::Duration waited) {
                     NoteWait(peer, waited);
                   }}),
        all_ranks_(options.world_size) {
    std::iota(all_ranks_.begin(), all_ranks_.end(), 0);
  }

  absl::string_view backend() const override { return "gloo"; }

 protected:
  absl::Status DoAllGather(const Call& call, const at::Tensor& shard,
                           const at::Tensor& whole) override;
  absl::Status DoReduceScatter(const Call& call, const at::Tensor& whole,
                               const at::Tensor& shard,
                               double divisor) override;
  absl::Status DoAllReduceSum(const Call& call,
                              const at::Tensor& tensor) override;
  absl::Status DoBroadcast(const Call& call, const at::Tensor& tensor,
                           int root) override;
  absl::StatusOr<std::vector<std::string>> DoAllGatherStrings(
      const Call& call, const std::string& mine) override;

 private:
  // Runs `body` under the monitor. `memory` is what messages may point into.
  absl::Status Exchange(const Call& call, std::vector<at::Tensor> memory,
                        const std::function<absl::Status()>& body);

  // What collectives are made of; below Watched.
  absl::Status GatherSlices(uint32_t tag, const at::Tensor& whole,
                            const std::vector<Slice>& slices) {
    return messages_.GatherSlices(tag, all_ranks_, whole, slices);
  }
  absl::Status SumSlices(uint32_t tag, const at::Tensor& whole,
                         const std::vector<Slice>& slices,
                         const at::Tensor& out);
  absl::Status SumEverything(uint32_t tag, const at::Tensor& tensor);

  // Elements as those of `like`, until the collective has ended.
  absl::StatusOr<at::Tensor> ReceiveBuffer(const at::Tensor& like,
                                           int64_t numel);
  std::vector<Message> SendPieces(uint32_t tag, const at::Tensor& whole,
                                  const std::vector<Slice>& slices,
                                  int64_t piece_numel);
  absl::Status WaitAll(const std::vector<Message>& messages) {
    return messages_.WaitAll(messages);
  }
  // out = sum in rank order of `own` and, of the others, received[rank]. `out`
  // may be `own`.
  absl::Status AddInRankOrder(const at::Tensor& own,
                              const std::vector<at::Tensor>& received,
                              const at::Tensor& out);
  // The other ranks, those after this one first, so that not all ranks send to
  // the same one at the same time.
  std::vector<int> Peers() const;

  GlooMessages messages_;
  PieceBuffers buffers_;
  std::vector<int> all_ranks_;
};

std::vector<int> GlooCommunicator::Peers() const {
  std::vector<int> peers;
  for (int i = 1; i < world_size(); ++i) {
    peers.push_back((rank() + i) % world_size());
  }
  return peers;
}

absl::Status GlooCommunicator::Exchange(
    const Call& call, std::vector<at::Tensor> memory,
    const std::function<absl::Status()>& body) {
  return messages_.Run(std::move(memory), [&] { return Watched(call, body); });
}

absl::StatusOr<at::Tensor> GlooCommunicator::ReceiveBuffer(
    const at::Tensor& like, int64_t numel) {
  const int64_t bytes = numel * like.element_size();
  TESSERA_ASSIGN_OR_RETURN(const at::Tensor buffer,
                           buffers_.Take(bytes, bytes));
  messages_.Keep(std::make_shared<at::Tensor>(buffer));
  return TensorOver(static_cast<char*>(buffer.mutable_data_ptr()), {numel}, {1},
                    like.scalar_type(), at::kCPU);
}

absl::Status GlooCommunicator::AddInRankOrder(
    const at::Tensor& own, const std::vector<at::Tensor>& received,
    const at::Tensor& out) {
  TESSERA_ASSIGN_OR_RETURN(const auto type, ElementTypeOf(own.scalar_type()));
  std::vector<const void*> sources;
  for (int r = 0; r < world_size(); ++r) {
    sources.push_back((r == rank() ? own : received[r]).const_data_ptr());
  }
  ReduceInOrder(type, ReduceOp::kSum, out.mutable_data_ptr(), sources.data(),
                world_size(), own.numel());
  return absl::OkStatus();
}

std::vector<Message> GlooCommunicator::SendPieces(
    uint32_t tag, const at::Tensor& whole, const std::vector<Slice>& slices,
    int64_t piece_numel) {
  std::vector<Message> sends;
  for (int64_t at = 0; at < slices[0].numel; at += piece_numel) {
    for (int peer : Peers()) {
      const Slice& slice = slices[peer];
      if (at >= slice.numel) continue;
      const int64_t numel = std::min(piece_numel, slice.numel - at);
      sends.push_back(messages_.Send(
          ElementsOver(whole, slice.begin + at, numel), peer, tag));
    }
  }
  return sends;
}

// Why pieces: with whole slices a rank would hold W - 1 of them, more than the
// tensor itself. Why two halves: a piece that is summed leaves its half free
// for the one after the next, so the network never waits for a sum. All sends
// are started at once, and waited for last: a rank that waited for its sends
// before it received could wait for one that does the same.
absl::Status GlooCommunicator::SumSlices(uint32_t tag, const at::Tensor& whole,
                                         const std::vector<Slice>& slices,
                                         const at::Tensor& out) {
  const Slice mine = slices[rank()];
  const int num_peers = world_size() - 1;
  const int64_t piece_numel = std::min(
      slices[0].numel,
      std::max(kGlooReceiveBytes / (2 * num_peers), kGlooMinPieceBytes) /
          static_cast<int64_t>(whole.element_size()));
  TESSERA_ASSIGN_OR_RETURN(at::Tensor buffer,
                           ReceiveBuffer(whole, 2 * num_peers * piece_numel));

  struct Piece {
    std::vector<at::Tensor> received;  // by rank, own one undefined
    std::vector<Message> messages;
  };
  // Piece k lands in half k % 2 of the buffer, while k - 1 is being summed.
  auto start = [&](int64_t at) {
    Piece piece;
    piece.received.resize(world_size());
    int64_t place = (at / piece_numel) % 2 * num_peers * piece_numel;
    for (int peer : Peers()) {
      piece.received[peer] =
          ElementsOver(buffer, place, std::min(piece_numel, mine.numel - at));
      piece.messages.push_back(
          messages_.Receive(piece.received[peer], peer, tag));
      place += piece_numel;
    }
    return piece;
  };

  Piece next;
  if (mine.numel > 0) next = start(0);
  std::vector<Message> sends = SendPieces(tag, whole, slices, piece_numel);
  for (int64_t at = 0; at < mine.numel; at += piece_numel) {
    Piece piece = std::move(next);
    if (at + piece_numel < mine.numel) next = start(at + piece_numel);
    TESSERA_RETURN_IF_ERROR(WaitAll(piece.messages));
    const int64_t numel = std::min(piece_numel, mine.numel - at);
    TESSERA_RETURN_IF_ERROR(
        AddInRankOrder(ElementsOver(whole, mine.begin + at, numel),
                       piece.received, ElementsOver(out, at, numel)));
  }
  return WaitAll(sends);
}

absl::Status GlooCommunicator::SumEverything(uint32_t tag,
                                             const at::Tensor& tensor) {
  const int64_t numel = tensor.numel();
  TESSERA_ASSIGN_OR_RETURN(at::Tensor buffer,
                           ReceiveBuffer(tensor, (world_size() - 1) * numel));
  std::vector<at::Tensor> received(world_size());
  std::vector<Message> messages;
  int64_t place = 0;
  for (int peer : Peers()) {
    received[peer] = ElementsOver(buffer, place, numel);
    place += numel;
    messages.push_back(messages_.Receive(received[peer], peer, tag));
    messages.push_back(
        messages_.Send(ElementsOver(tensor, 0, numel), peer, tag));
  }
  // Sends too: the sum overwrites what they read.
  TESSERA_RETURN_IF_ERROR(WaitAll(messages));
  at::Tensor own = ElementsOver(tensor, 0, numel);
  return AddInRankOrder(own, received, own);
}

absl::Status GlooCommunicator::DoAllGather(const Call& call,
                                           const at::Tensor& shard,
                                           const at::Tensor& whole) {
  const int64_t bytes = shard.nbytes();
  char* own = static_cast<char*>(whole.mutable_data_ptr()) + rank() * bytes;
  if (own != shard.const_data_ptr()) {
    std::memcpy(own, shard.const_data_ptr(), bytes);
  }
  return Exchange(call, {shard, whole}, [&] {
    return GatherSlices(call.signature, whole,
                        Slices(whole.numel(), world_size()));
  });
}

absl::Status GlooCommunicator::DoReduceScatter(const Call& call,
                                               const at::Tensor& whole,
                                               const at::Tensor& shard,
                                               double divisor) {
  TESSERA_RETURN_IF_ERROR(Exchange(call, {whole, shard}, [&] {
    return SumSlices(call.signature, whole, Slices(whole.numel(), world_size()),
                     shard);
  }));
  DivideBy(shard, divisor);
  return absl::OkStatus();
}

absl::Status GlooCommunicator::DoAllReduceSum(const Call& call,
                                              const at::Tensor& tensor) {
  const int64_t all_bytes =
      static_cast<int64_t>(tensor.nbytes()) * world_size();
  return Exchange(call, {tensor}, [&]() -> absl::Status {
    if (all_bytes <= kSingleExchangeBytes) {
      return SumEverything(call.signature, tensor);
    }
    const std::vector<Slice> slices = Slices(tensor.numel(), world_size());
    const Slice mine = slices[rank()];
    TESSERA_RETURN_IF_ERROR(
        SumSlices(call.signature, tensor, slices,
                  ElementsOver(tensor, mine.begin, mine.numel)));
    return GatherSlices(call.signature, tensor, slices);
  });
}

absl::Status GlooCommunicator::DoBroadcast(const Call& call,
                                           const at::Tensor& tensor, int root) {
  return Exchange(call, {tensor}, [&] {
    at::Tensor all = ElementsOver(tensor, 0, tensor.numel());
    std::vector<Message> messages;
    if (rank() != root) {
      messages.push_back(messages_.Receive(all, root, call.signature));
    } else {
      for (int peer : Peers()) {
        messages.push_back(messages_.Send(all, peer, call.signature));
      }
    }
    return WaitAll(messages);
  });
}

absl::StatusOr<std::vector<std::string>> GlooCommunicator::DoAllGatherStrings(
    const Call& call, const std::string& mine) {
  std::vector<std::string> texts;
  TESSERA_RETURN_IF_ERROR(Exchange(call, {}, [&]() -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(
        texts, messages_.GatherTexts(call.signature, all_ranks_, mine));
    return absl::OkStatus();
  }));
  return texts;
}

}  // namespace

absl::StatusOr<std::shared_ptr<GlooTransport>> ConnectGloo(
    const c10::intrusive_ptr<c10d::Store>& store,
    const GlooCommunicatorOptions& options) {
  GlooTransport::Options transport_options;
  transport_options.rank = options.rank;
  transport_options.world_size = options.world_size;
  transport_options.same_host = options.same_host;
  transport_options.address = options.address;
  transport_options.names = options.first_ranks;
  transport_options.connect_timeout = options.connect_timeout;
  // Its own client: Gloo may block in the store, announcements must not.
  TESSERA_ASSIGN_OR_RETURN(c10::intrusive_ptr<c10d::Store> own_client,
                           CatchTorch("store", [&] { return store->clone(); }));
  return GlooTransport::Connect(std::move(own_client), transport_options);
}

absl::StatusOr<std::shared_ptr<Communicator>> MakeGlooCommunicator(
    c10::intrusive_ptr<c10d::Store> store,
    const GlooCommunicatorOptions& options) {
  TESSERA_ASSIGN_OR_RETURN(
      std::shared_ptr<FailureDomain> domain,
      FailureDomain::Join(store, options, options.same_host));
  TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<GlooTransport> transport,
                           ConnectGloo(store, options));
  return std::shared_ptr<Communicator>(std::make_shared<GlooCommunicator>(
      options, std::move(domain), std::move(transport)));
}

}  // namespace tessera
