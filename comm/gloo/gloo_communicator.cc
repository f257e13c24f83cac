#include "comm/gloo/gloo_communicator.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/from_blob.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "comm/gloo/gloo_messages.h"
#include "comm/gloo/gloo_transport.h"
#include "comm/group/host_communicator.h"
#include "comm/reduce/element_type.h"
#include "comm/reduce/slices.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace tessera {
namespace {

using Message = GlooMessages::Message;

// Both sets of receive buffers, for all peers together. Larger ones leave the
// cache and are no faster; much smaller ones are slower.
constexpr int64_t kReceiveBytes = 4 << 20;
constexpr int64_t kMinPieceBytes = 64 << 10;
// An all-reduce up to here, over all ranks, is one exchange of everything.
constexpr int64_t kSingleExchangeBytes = 64 << 10;

class GlooCommunicator : public HostCommunicator {
 public:
  GlooCommunicator(const GlooCommunicatorOptions& options,
                   std::shared_ptr<FailureDomain> domain,
                   std::shared_ptr<GlooTransport> transport)
      : HostCommunicator(options, std::move(domain),
                         [transport] { transport->Abort(); }),
        messages_(std::move(transport),
                  {options.rank, options.world_size,
                   [this](int peer) { SetAwaited(peer); },
                   [this](int peer, absl::Duration waited) {
                     NoteWait(peer, waited);
                   }}),
        receive_buffer_(std::make_shared<CountedBuffer>()),
        all_ranks_(options.world_size) {
    std::iota(all_ranks_.begin(), all_ranks_.end(), 0);
  }

  absl::string_view backend() const override { return "gloo"; }

 protected:
  absl::Status HostAllGather(const Call& call, const at::Tensor& shard,
                             const at::Tensor& whole) override;
  absl::Status HostReduceScatterSum(const Call& call, const at::Tensor& whole,
                                    const at::Tensor& shard) override;
  absl::Status HostAllReduceSum(const Call& call,
                                const at::Tensor& tensor) override;
  absl::Status HostBroadcast(const Call& call, const at::Tensor& tensor,
                             int root) override;
  absl::StatusOr<std::vector<std::string>> DoAllGatherStrings(
      const Call& call, const std::string& mine) override;

 private:
  // Runs `body` under the monitor. `memory` is what messages may point into.
  absl::Status Exchange(const Call& call, std::vector<at::Tensor> memory,
                        const std::function<absl::Status()>& body);

  // The parts of collectives; CPU tensors, below Watched.
  absl::Status GatherSlices(uint32_t tag, const at::Tensor& whole,
                            const std::vector<Slice>& slices) {
    return messages_.GatherSlices(tag, all_ranks_, whole, slices);
  }
  absl::Status SumSlices(uint32_t tag, const at::Tensor& whole,
                         const std::vector<Slice>& slices,
                         const at::Tensor& out);
  absl::Status SumEverything(uint32_t tag, const at::Tensor& tensor);

  absl::StatusOr<at::Tensor> ReceiveBuffer(const at::Tensor& like,
                                           int64_t numel);
  std::vector<Message> SendPieces(uint32_t tag, const at::Tensor& whole,
                                  const std::vector<Slice>& slices,
                                  int64_t piece_numel);
  absl::Status WaitAll(const std::vector<Message>& messages) {
    return messages_.WaitAll(messages);
  }
  // out = sum in rank order of `own` and, of the others, parts[rank]. `out` may
  // be `own`.
  absl::Status AddInRankOrder(const at::Tensor& own,
                              const std::vector<at::Tensor>& parts,
                              const at::Tensor& out);
  // The other ranks, those after this one first, so that not all ranks send to
  // the same one at the same time.
  std::vector<int> Peers() const;

  GlooMessages messages_;
  std::shared_ptr<CountedBuffer> receive_buffer_;
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
  return messages_.Run(std::move(memory), [&] {
    messages_.Keep(receive_buffer_);
    return Watched(call, body);
  });
}

absl::StatusOr<at::Tensor> GlooCommunicator::ReceiveBuffer(
    const at::Tensor& like, int64_t numel) {
  const int64_t bytes = numel * like.element_size();
  if (receive_buffer_->bytes() < bytes) {
    receive_buffer_->Free();
    TESSERA_ASSIGN_OR_RETURN(
        *receive_buffer_, AllocateCounted(bytes, MemoryKind::kCommunication));
  }
  return at::from_blob(receive_buffer_->data(), {numel},
                       at::TensorOptions().dtype(like.dtype()));
}

absl::Status GlooCommunicator::AddInRankOrder(
    const at::Tensor& own, const std::vector<at::Tensor>& parts,
    const at::Tensor& out) {
  TESSERA_ASSIGN_OR_RETURN(const auto type, ElementTypeOf(own.scalar_type()));
  std::vector<const void*> sources;
  for (int r = 0; r < world_size(); ++r) {
    sources.push_back((r == rank() ? own : parts[r]).const_data_ptr());
  }
  shm::ReduceInOrder(type, shm::ReduceOp::kSum, out.mutable_data_ptr(),
                     sources.data(), world_size(), own.numel());
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
          BorrowElements(whole, slice.begin + at, numel), peer, tag));
    }
  }
  return sends;
}

absl::Status GlooCommunicator::SumSlices(uint32_t tag, const at::Tensor& whole,
                                         const std::vector<Slice>& slices,
                                         const at::Tensor& out) {
  const Slice mine = slices[rank()];
  const int num_peers = world_size() - 1;
  const int64_t piece_numel =
      std::min(slices[0].numel,
               std::max(kReceiveBytes / (2 * num_peers), kMinPieceBytes) /
                   static_cast<int64_t>(whole.element_size()));
  TESSERA_ASSIGN_OR_RETURN(at::Tensor buffer,
                           ReceiveBuffer(whole, 2 * num_peers * piece_numel));

  struct Piece {
    std::vector<at::Tensor> parts;  // by rank, own one undefined
    std::vector<Message> messages;
  };
  // Piece k lands in half k % 2 of the buffer, while k - 1 is being summed.
  auto start = [&](int64_t at) {
    Piece piece;
    piece.parts.resize(world_size());
    int64_t place = (at / piece_numel) % 2 * num_peers * piece_numel;
    for (int peer : Peers()) {
      piece.parts[peer] =
          BorrowElements(buffer, place, std::min(piece_numel, mine.numel - at));
      piece.messages.push_back(messages_.Receive(piece.parts[peer], peer, tag));
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
        AddInRankOrder(BorrowElements(whole, mine.begin + at, numel),
                       piece.parts, BorrowElements(out, at, numel)));
  }
  return WaitAll(sends);
}

absl::Status GlooCommunicator::SumEverything(uint32_t tag,
                                             const at::Tensor& tensor) {
  const int64_t numel = tensor.numel();
  TESSERA_ASSIGN_OR_RETURN(at::Tensor buffer,
                           ReceiveBuffer(tensor, (world_size() - 1) * numel));
  std::vector<at::Tensor> parts(world_size());
  std::vector<Message> messages;
  int64_t place = 0;
  for (int peer : Peers()) {
    parts[peer] = BorrowElements(buffer, place, numel);
    place += numel;
    messages.push_back(messages_.Receive(parts[peer], peer, tag));
    messages.push_back(
        messages_.Send(BorrowElements(tensor, 0, numel), peer, tag));
  }
  // Sends too: the sum overwrites what they read.
  TESSERA_RETURN_IF_ERROR(WaitAll(messages));
  at::Tensor own = BorrowElements(tensor, 0, numel);
  return AddInRankOrder(own, parts, own);
}

absl::Status GlooCommunicator::HostAllGather(const Call& call,
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

absl::Status GlooCommunicator::HostReduceScatterSum(const Call& call,
                                                    const at::Tensor& whole,
                                                    const at::Tensor& shard) {
  return Exchange(call, {whole, shard}, [&] {
    return SumSlices(call.signature, whole, Slices(whole.numel(), world_size()),
                     shard);
  });
}

absl::Status GlooCommunicator::HostAllReduceSum(const Call& call,
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
                  BorrowElements(tensor, mine.begin, mine.numel)));
    return GatherSlices(call.signature, tensor, slices);
  });
}

absl::Status GlooCommunicator::HostBroadcast(const Call& call,
                                             const at::Tensor& tensor,
                                             int root) {
  return Exchange(call, {tensor}, [&] {
    at::Tensor all = BorrowElements(tensor, 0, tensor.numel());
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
