#include "comm/hierarchical/hierarchical_transport.h"

#include <cstring>
#include <functional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/torch/divide.h"
#include "base/torch_guard.h"
#include "comm/gloo/gloo_messages.h"
#include "comm/hierarchical/hierarchical_ops.h"
#include "comm/hierarchical/host_plan.h"
#include "comm/hierarchical/packed_texts.h"
#include "comm/reduce/element_type.h"
#include "comm/reduce/slices.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace tessera {
namespace {

class HierarchicalTransport : public Transport {
 public:
  HierarchicalTransport(const HierarchicalOptions& options,
                        std::shared_ptr<ShmMemory> memory,
                        std::shared_ptr<GlooLinks> links)
      : rank_(options.rank),
        world_size_(options.world_size),
        placement_(options.hosts),
        memory_(std::move(memory)),
        links_(links),
        messages_(std::move(links), rank_, world_size_),
        group_{&placement_, rank_, &memory_->collectives.exchange(), &messages_,
               &buffers_} {
    for (int h = 0; h < placement_.num_hosts(); ++h) {
      leaders_.push_back(placement_.ranks_of(h).front());
    }
  }

  absl::string_view name() const override { return "hierarchical"; }
  Capabilities capabilities() const override { return {}; }
  void Listen(WaitListener listener) override;
  absl::Status Run(const CommCall& call) override;
  void Abort() override {
    memory_->team.Abort(absl::CancelledError("aborted"));
    links_->Abort();
  }

 private:
  const std::vector<int>& LocalRanks() const {
    return placement_.ranks_of(placement_.host_of(rank_));
  }
  absl::Status RunIn(const CommCall& call);
  absl::Status AllGather(const CommCall& call);
  // Carries out reduce-scatter and all-reduce.
  absl::Status Sum(const CommCall& call);
  absl::Status Broadcast(const CommCall& call);
  absl::Status GatherTexts(const CommCall& call);
  // An operation on `tensor`, one slice for each rank.
  SlicedCall SlicesOf(const CommCall& call, const at::Tensor& tensor) const;

  const int rank_, world_size_;
  const HostPlacement placement_;
  const std::shared_ptr<ShmMemory> memory_;
  const std::shared_ptr<GlooLinks> links_;
  GlooMessages messages_;
  PieceBuffers buffers_;
  const HostGroup group_;
  std::vector<int> leaders_;  // by host: its first rank
  std::function<void(int, absl::Duration)> waited_;
};

void HierarchicalTransport::Listen(WaitListener listener) {
  waited_ = listener.waited;
  std::vector<int> local_names;
  for (int r : LocalRanks()) local_names.push_back(listener.names[r]);
  memory_->Watch(
      local_names,
      [awaited = listener.awaited, local = LocalRanks()](int peer) {
        awaited(local[peer]);
      },
      [end_of = listener.end_of, local = LocalRanks()](int peer) {
        return end_of(local[peer]);
      });
  messages_.Listen(std::move(listener));
}

absl::Status HierarchicalTransport::Run(const CommCall& call) {
  group_.exchange->SetNumber(call.sequence);
  const absl::Status status =
      messages_.Run({call.in, call.out}, [&] { return RunIn(call); });
  memory_->team.TakeWaits([this](int peer, absl::Duration waited) {
    waited_(LocalRanks()[peer], waited);
  });
  return status;
}

absl::Status HierarchicalTransport::RunIn(const CommCall& call) {
  switch (call.op) {
    case CollectiveOp::kAllGather:
      return AllGather(call);
    case CollectiveOp::kReduceScatter:
    case CollectiveOp::kAllReduce:
      return Sum(call);
    case CollectiveOp::kBroadcast:
      return Broadcast(call);
    case CollectiveOp::kText:
      return GatherTexts(call);
    default:
      return messages_.MoveParts(call.signature, PartsOf(call, world_size_));
  }
}

SlicedCall HierarchicalTransport::SlicesOf(const CommCall& call,
                                           const at::Tensor& tensor) const {
  SlicedCall result;
  // With the details: ranks of a host whose dtypes differ are in different
  // collectives.
  result.what = call.Name();
  result.signature = call.signature;
  result.op = call.op;
  result.data = static_cast<char*>(tensor.mutable_data_ptr());
  const auto element_bytes = static_cast<int64_t>(tensor.element_size());
  int owner = 0;
  for (const Slice& slice : Slices(tensor.numel(), world_size_)) {
    result.slices.push_back(
        {slice.begin * element_bytes, slice.numel * element_bytes, owner++});
  }
  return result;
}

absl::Status HierarchicalTransport::AllGather(const CommCall& call) {
  messages_.PutOwn(call.in, call.out);
  return GatherSlices(group_, SlicesOf(call, call.out));
}

absl::Status HierarchicalTransport::Sum(const CommCall& call) {
  const bool all = call.op == CollectiveOp::kAllReduce;
  SlicedCall sliced = SlicesOf(call, call.whole());
  TESSERA_ASSIGN_OR_RETURN(sliced.type, ElementTypeOf(call.out.scalar_type()));
  char* const out = all ? sliced.data + sliced.slices[rank_].begin
                        : static_cast<char*>(call.out.mutable_data_ptr());
  TESSERA_RETURN_IF_ERROR(SumSlices(group_, sliced, out));
  if (all) return GatherSlices(group_, sliced);
  DivideBy(call.out, call.divisor);
  return absl::OkStatus();
}

absl::Status HierarchicalTransport::Broadcast(const CommCall& call) {
  SlicedCall sliced = SlicesOf(call, call.out);
  sliced.root = call.root;
  sliced.slices = {{0, static_cast<int64_t>(call.out.nbytes()), call.root}};
  return GatherSlices(group_, sliced);
}

// Within the host, between the hosts' first ranks, within the host.
absl::Status HierarchicalTransport::GatherTexts(const CommCall& call) {
  std::vector<std::string> local;
  TESSERA_RETURN_IF_ERROR(
      memory_->collectives.AllGatherTexts(call.Name(), call.text, &local));
  std::string packed;
  if (rank_ == LocalRanks().front()) {
    TESSERA_ASSIGN_OR_RETURN(
        const std::vector<std::string> hosts,
        messages_.GatherTexts(call.signature, leaders_, PackTexts(local)));
    packed = PackTexts(hosts);
  }
  TESSERA_RETURN_IF_ERROR(
      memory_->collectives.AllGatherTexts(call.Name(), packed, &local));
  TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> hosts,
                           UnpackTexts(local.front(), placement_.num_hosts()));
  call.texts->resize(world_size_);
  for (int h = 0; h < placement_.num_hosts(); ++h) {
    TESSERA_ASSIGN_OR_RETURN(
        const std::vector<std::string> of_host,
        UnpackTexts(hosts[h], placement_.ranks_of(h).size()));
    for (size_t i = 0; i < of_host.size(); ++i) {
      (*call.texts)[placement_.ranks_of(h)[i]] = of_host[i];
    }
  }
  return absl::OkStatus();
}

// Every rank's word about how its host went; all return the same. Why: a host
// whose ranks can share memory must not go on, into connecting with hosts that
// have given up, and a fall back to another backend has to be every rank's.
absl::Status AgreeOnHosts(c10d::Store& store,
                          const HierarchicalOptions& options,
                          const absl::Status& mine) {
  const std::string text = mine.ok() ? "" : std::string(mine.message());
  store.set(absl::StrCat("host_done/", options.rank),
            std::vector<uint8_t>(text.begin(), text.end()));
  absl::Status all;
  for (int r = 0; r < options.world_size; ++r) {
    const std::string key = absl::StrCat("host_done/", r);
    store.wait({key}, absl::ToChronoMilliseconds(options.connect_timeout));
    const std::vector<uint8_t> word = store.get(key);
    if (word.empty() || !all.ok()) continue;
    all = absl::UnavailableError(
        absl::StrCat("on the host of rank ", options.first_rank(r), ": ",
                     std::string(word.begin(), word.end())));
  }
  return all;
}

}  // namespace

absl::StatusOr<std::shared_ptr<ShmMemory>> ConnectHosts(
    const c10::intrusive_ptr<c10d::Store>& store,
    const HierarchicalOptions& options) {
  const HostPlacement placement(options.hosts);
  const int host = placement.host_of(options.rank);
  std::vector<int> names;
  for (int r : placement.ranks_of(host)) names.push_back(options.first_rank(r));
  auto memory = ConnectShm(c10::make_intrusive<c10d::PrefixStore>(
                               absl::StrCat("host/", host), store),
                           placement.local_rank_of(options.rank),
                           static_cast<int>(names.size()),
                           options.connect_timeout, names);
  TESSERA_RETURN_IF_ERROR(CatchTorch("store", [&] {
    // Its own client, as ConnectShm's.
    return AgreeOnHosts(*store->clone(), options, memory.status());
  }));
  return memory;
}

absl::StatusOr<std::shared_ptr<Transport>> ConnectHierarchicalTransport(
    const c10::intrusive_ptr<c10d::Store>& store,
    const HierarchicalOptions& options, std::shared_ptr<ShmMemory> memory) {
  TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<GlooLinks> links,
                           GlooLinks::Connect(store, options));
  return std::make_shared<HierarchicalTransport>(options, std::move(memory),
                                                 std::move(links));
}

}  // namespace tessera
