#include "comm/gloo/gloo_transport.h"

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
#include "comm/backend_table.h"
#include "comm/gloo/gloo_messages.h"
#include "comm/gloo/piece_buffers.h"
#include "comm/reduce/element_type.h"
#include "comm/reduce/slices.h"

namespace tessera {
namespace {

using Message = GlooMessages::Message;

// An all-reduce up to here, over all ranks, is one exchange of everything.
constexpr int64_t kSingleExchangeBytes = 64 << 10;

class GlooTransport : public Transport {
 public:
  GlooTransport(const GlooTransportOptions& options,
                std::shared_ptr<GlooLinks> links)
      : rank_(options.rank),
        world_size_(options.world_size),
        links_(links),
        messages_(std::move(links), rank_, world_size_),
        all_ranks_(world_size_) {
    std::iota(all_ranks_.begin(), all_ranks_.end(), 0);
  }

  absl::string_view name() const override { return "gloo"; }
  Capabilities capabilities() const override {
    Capabilities can;
    can.prefers_pulls = true;
    return can;
  }
  void Listen(WaitListener listener) override {
    messages_.Listen(std::move(listener));
  }
  absl::Status Run(const CommCall& call) override {
    return messages_.Run({call.in, call.out}, [&] { return RunIn(call); });
  }
  void Abort() override { links_->Abort(); }

 private:
  absl::Status RunIn(const CommCall& call);

  // What collectives are made of.
  absl::Status SumSlices(uint32_t tag, const at::Tensor& whole,
                         const std::vector<Slice>& slices,
                         const at::Tensor& out);
  absl::Status SumEverything(uint32_t tag, const at::Tensor& tensor);
  absl::Status AllReduce(const CommCall& call);
  absl::Status Broadcast(const CommCall& call);

  // Elements as those of `like`, until the collective has ended.
  absl::StatusOr<at::Tensor> ReceiveBuffer(const at::Tensor& like,
                                           int64_t numel);
  std::vector<Message> SendPieces(uint32_t tag, const at::Tensor& whole,
                                  const std::vector<Slice>& slices,
                                  int64_t piece_numel);
  // out = sum in rank order of `own` and, of the others, received[rank]. `out`
  // may be `own`.
  absl::Status AddInRankOrder(const at::Tensor& own,
                              const std::vector<at::Tensor>& received,
                              const at::Tensor& out);
  // The other ranks, those after this one first, so that not all ranks send to
  // the same one at the same time.
  std::vector<int> Peers() const;

  const int rank_, world_size_;
  const std::shared_ptr<GlooLinks> links_;
  GlooMessages messages_;
  PieceBuffers buffers_;
  std::vector<int> all_ranks_;
};

std::vector<int> GlooTransport::Peers() const {
  std::vector<int> peers;
  for (int i = 1; i < world_size_; ++i) {
    peers.push_back((rank_ + i) % world_size_);
  }
  return peers;
}

absl::StatusOr<at::Tensor> GlooTransport::ReceiveBuffer(const at::Tensor& like,
                                                        int64_t numel) {
  const int64_t bytes = numel * like.element_size();
  TESSERA_ASSIGN_OR_RETURN(const at::Tensor buffer,
                           buffers_.Take(bytes, bytes));
  messages_.Keep(std::make_shared<at::Tensor>(buffer));
  return TensorOver(static_cast<char*>(buffer.mutable_data_ptr()), {numel}, {1},
                    like.scalar_type(), at::kCPU);
}

absl::Status GlooTransport::AddInRankOrder(
    const at::Tensor& own, const std::vector<at::Tensor>& received,
    const at::Tensor& out) {
  TESSERA_ASSIGN_OR_RETURN(const auto type, ElementTypeOf(own.scalar_type()));
  std::vector<const void*> sources;
  for (int r = 0; r < world_size_; ++r) {
    sources.push_back((r == rank_ ? own : received[r]).const_data_ptr());
  }
  ReduceInOrder(type, ReduceOp::kSum, out.mutable_data_ptr(), sources.data(),
                world_size_, own.numel());
  return absl::OkStatus();
}

std::vector<Message> GlooTransport::SendPieces(uint32_t tag,
                                               const at::Tensor& whole,
                                               const std::vector<Slice>& slices,
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
absl::Status GlooTransport::SumSlices(uint32_t tag, const at::Tensor& whole,
                                      const std::vector<Slice>& slices,
                                      const at::Tensor& out) {
  const Slice mine = slices[rank_];
  const int num_peers = world_size_ - 1;
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
    piece.received.resize(world_size_);
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
    TESSERA_RETURN_IF_ERROR(messages_.WaitAll(piece.messages));
    const int64_t numel = std::min(piece_numel, mine.numel - at);
    TESSERA_RETURN_IF_ERROR(
        AddInRankOrder(ElementsOver(whole, mine.begin + at, numel),
                       piece.received, ElementsOver(out, at, numel)));
  }
  return messages_.WaitAll(sends);
}

absl::Status GlooTransport::SumEverything(uint32_t tag,
                                          const at::Tensor& tensor) {
  const int64_t numel = tensor.numel();
  TESSERA_ASSIGN_OR_RETURN(at::Tensor buffer,
                           ReceiveBuffer(tensor, (world_size_ - 1) * numel));
  std::vector<at::Tensor> received(world_size_);
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
  TESSERA_RETURN_IF_ERROR(messages_.WaitAll(messages));
  at::Tensor own = ElementsOver(tensor, 0, numel);
  return AddInRankOrder(own, received, own);
}

absl::Status GlooTransport::AllReduce(const CommCall& call) {
  const at::Tensor& tensor = call.out;
  const int64_t all_bytes = static_cast<int64_t>(tensor.nbytes()) * world_size_;
  if (all_bytes <= kSingleExchangeBytes) {
    return SumEverything(call.signature, tensor);
  }
  const std::vector<Slice> slices = Slices(tensor.numel(), world_size_);
  const Slice mine = slices[rank_];
  TESSERA_RETURN_IF_ERROR(
      SumSlices(call.signature, tensor, slices,
                ElementsOver(tensor, mine.begin, mine.numel)));
  return messages_.GatherSlices(call.signature, all_ranks_, tensor, slices);
}

absl::Status GlooTransport::Broadcast(const CommCall& call) {
  const at::Tensor all = ElementsOver(call.out, 0, call.out.numel());
  std::vector<Message> messages;
  if (rank_ != call.root) {
    messages.push_back(messages_.Receive(all, call.root, call.signature));
  } else {
    for (int peer : Peers()) {
      messages.push_back(messages_.Send(all, peer, call.signature));
    }
  }
  return messages_.WaitAll(messages);
}

absl::Status GlooTransport::RunIn(const CommCall& call) {
  switch (call.op) {
    case CollectiveOp::kAllGather:
      messages_.PutOwn(call.in, call.out);
      return messages_.GatherSlices(call.signature, all_ranks_, call.out,
                                    Slices(call.out.numel(), world_size_));
    case CollectiveOp::kReduceScatter:
      TESSERA_RETURN_IF_ERROR(SumSlices(call.signature, call.in,
                                        Slices(call.in.numel(), world_size_),
                                        call.out));
      DivideBy(call.out, call.divisor);
      return absl::OkStatus();
    case CollectiveOp::kAllReduce:
      return AllReduce(call);
    case CollectiveOp::kBroadcast:
      return Broadcast(call);
    case CollectiveOp::kText: {
      TESSERA_ASSIGN_OR_RETURN(
          *call.texts,
          messages_.GatherTexts(call.signature, all_ranks_, call.text));
      return absl::OkStatus();
    }
    default:
      return messages_.MoveParts(call.signature, PartsOf(call, world_size_));
  }
}

}  // namespace

absl::StatusOr<std::shared_ptr<Transport>> ConnectGlooTransport(
    const c10::intrusive_ptr<c10d::Store>& store,
    const GlooTransportOptions& options) {
  TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<GlooLinks> links,
                           GlooLinks::Connect(store, options));
  return std::make_shared<GlooTransport>(options, std::move(links));
}

}  // namespace tessera
