#include "comm/hierarchical/hierarchical_communicator.h"

#include <cstring>
#include <functional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/torch/divide.h"
#include "base/torch_guard.h"
#include "comm/gloo/gloo_messages.h"
#include "comm/group/watched_communicator.h"
#include "comm/hierarchical/hierarchical_ops.h"
#include "comm/hierarchical/host_plan.h"
#include "comm/hierarchical/packed_texts.h"
#include "comm/reduce/element_type.h"
#include "comm/reduce/slices.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace tessera {
namespace {

class HierarchicalCommunicator : public WatchedCommunicator {
 public:
  HierarchicalCommunicator(const HierarchicalOptions& options,
                           std::shared_ptr<FailureDomain> domain,
                           std::shared_ptr<ShmMemory> memory,
                           std::shared_ptr<GlooTransport> transport)
      : WatchedCommunicator(
            options, std::move(domain),
            [memory, transport] {
              memory->team.Abort(absl::CancelledError("aborted"));
              transport->Abort();
            },
            TensorsSeen::kOnHost),
        placement_(options.hosts),
        memory_(std::move(memory)),
        messages_(std::move(transport),
                  {options.rank, options.world_size,
                   [this](int peer) { SetAwaited(peer); },
                   [this](int peer, absl::Duration waited) {
                     NoteWait(peer, waited);
                   }}),
        group_{&placement_, options.rank, &memory_->collectives.exchange(),
               &messages_, &buffers_} {
    std::vector<int> local_names;
    for (int r : LocalRanks()) local_names.push_back(names()[r]);
    memory_->Watch(
        local_names, [this](int peer) { SetAwaited(LocalRanks()[peer]); },
        [this](int peer) { return EndOf(LocalRanks()[peer]); });
    for (int h = 0; h < placement_.num_hosts(); ++h) {
      leaders_.push_back(placement_.ranks_of(h).front());
    }
  }

  absl::string_view backend() const override { return "hierarchical"; }

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
  const std::vector<int>& LocalRanks() const {
    return placement_.ranks_of(placement_.host_of(rank()));
  }
  // Runs `body` under the monitor. `memory` is what messages may point into.
  absl::Status Run(const Call& call, std::vector<at::Tensor> memory,
                   const std::function<absl::Status()>& body);
  // With the details: ranks of a host whose dtypes differ are in different
  // collectives.
  static std::string NameOf(const Call& call) {
    return absl::StrCat(call.what, " (", call.details, ")");
  }
  // An operation on `tensor`, one slice for each rank.
  SlicedCall SlicesOf(const Call& call, const at::Tensor& tensor) const;
  absl::Status GatherTexts(const Call& call, const std::string& mine,
                           std::vector<std::string>* texts);

  const HostPlacement placement_;
  const std::shared_ptr<ShmMemory> memory_;
  GlooMessages messages_;
  PieceBuffers buffers_;
  const HostGroup group_;
  std::vector<int> leaders_;  // by host: its first rank
};

absl::Status HierarchicalCommunicator::Run(
    const Call& call, std::vector<at::Tensor> memory,
    const std::function<absl::Status()>& body) {
  group_.exchange->SetNumber(call.sequence);
  return messages_.Run(std::move(memory), [&] {
    return Watched(call, [&] {
      const absl::Status status = body();
      memory_->team.TakeWaits([this](int peer, absl::Duration waited) {
        NoteWait(LocalRanks()[peer], waited);
      });
      return status;
    });
  });
}

SlicedCall HierarchicalCommunicator::SlicesOf(const Call& call,
                                              const at::Tensor& tensor) const {
  SlicedCall result;
  result.what = NameOf(call);
  result.signature = call.signature;
  result.data = static_cast<char*>(tensor.mutable_data_ptr());
  const auto element_bytes = static_cast<int64_t>(tensor.element_size());
  int owner = 0;
  for (const Slice& slice : Slices(tensor.numel(), world_size())) {
    result.slices.push_back(
        {slice.begin * element_bytes, slice.numel * element_bytes, owner++});
  }
  return result;
}

absl::Status HierarchicalCommunicator::DoAllGather(const Call& call,
                                                   const at::Tensor& shard,
                                                   const at::Tensor& whole) {
  SlicedCall sliced = SlicesOf(call, whole);
  sliced.op = shm::Op::kAllGather;
  char* const own = sliced.data + sliced.slices[rank()].begin;
  if (own != shard.const_data_ptr()) {
    std::memcpy(own, shard.const_data_ptr(), shard.nbytes());
  }
  return Run(call, {whole}, [&] { return GatherSlices(group_, sliced); });
}

absl::Status HierarchicalCommunicator::DoReduceScatter(const Call& call,
                                                       const at::Tensor& whole,
                                                       const at::Tensor& shard,
                                                       double divisor) {
  SlicedCall sliced = SlicesOf(call, whole);
  sliced.op = shm::Op::kReduceScatter;
  TESSERA_ASSIGN_OR_RETURN(sliced.type, ElementTypeOf(whole.scalar_type()));
  TESSERA_RETURN_IF_ERROR(Run(call, {whole, shard}, [&] {
    return SumSlices(group_, sliced,
                     static_cast<char*>(shard.mutable_data_ptr()));
  }));
  DivideBy(shard, divisor);
  return absl::OkStatus();
}

absl::Status HierarchicalCommunicator::DoAllReduceSum(
    const Call& call, const at::Tensor& tensor) {
  SlicedCall sliced = SlicesOf(call, tensor);
  sliced.op = shm::Op::kAllReduce;
  TESSERA_ASSIGN_OR_RETURN(sliced.type, ElementTypeOf(tensor.scalar_type()));
  return Run(call, {tensor}, [&]() -> absl::Status {
    TESSERA_RETURN_IF_ERROR(
        SumSlices(group_, sliced, sliced.data + sliced.slices[rank()].begin));
    return GatherSlices(group_, sliced);
  });
}

absl::Status HierarchicalCommunicator::DoBroadcast(const Call& call,
                                                   const at::Tensor& tensor,
                                                   int root) {
  SlicedCall sliced = SlicesOf(call, tensor);
  sliced.op = shm::Op::kBroadcast;
  sliced.root = root;
  sliced.slices = {{0, static_cast<int64_t>(tensor.nbytes()), root}};
  return Run(call, {tensor}, [&] { return GatherSlices(group_, sliced); });
}

absl::StatusOr<std::vector<std::string>>
HierarchicalCommunicator::DoAllGatherStrings(const Call& call,
                                             const std::string& mine) {
  std::vector<std::string> texts(world_size());
  TESSERA_RETURN_IF_ERROR(
      Run(call, {}, [&] { return GatherTexts(call, mine, &texts); }));
  return texts;
}

// Within the host, between the hosts' first ranks, within the host.
absl::Status HierarchicalCommunicator::GatherTexts(
    const Call& call, const std::string& mine,
    std::vector<std::string>* texts) {
  std::vector<std::string> local;
  TESSERA_RETURN_IF_ERROR(
      memory_->collectives.AllGatherTexts(NameOf(call), mine, &local));
  std::string packed;
  if (rank() == LocalRanks().front()) {
    TESSERA_ASSIGN_OR_RETURN(
        const std::vector<std::string> hosts,
        messages_.GatherTexts(call.signature, leaders_, PackTexts(local)));
    packed = PackTexts(hosts);
  }
  TESSERA_RETURN_IF_ERROR(
      memory_->collectives.AllGatherTexts(NameOf(call), packed, &local));
  TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> hosts,
                           UnpackTexts(local.front(), placement_.num_hosts()));
  for (int h = 0; h < placement_.num_hosts(); ++h) {
    TESSERA_ASSIGN_OR_RETURN(
        const std::vector<std::string> of_host,
        UnpackTexts(hosts[h], placement_.ranks_of(h).size()));
    for (size_t i = 0; i < of_host.size(); ++i) {
      (*texts)[placement_.ranks_of(h)[i]] = of_host[i];
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
    c10::intrusive_ptr<c10d::Store> store, const HierarchicalOptions& options) {
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

absl::StatusOr<std::shared_ptr<Communicator>> MakeHierarchicalCommunicator(
    c10::intrusive_ptr<c10d::Store> store, const HierarchicalOptions& options,
    std::shared_ptr<ShmMemory> memory) {
  TESSERA_ASSIGN_OR_RETURN(
      std::shared_ptr<FailureDomain> domain,
      FailureDomain::Join(store, options, options.same_host));
  TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<GlooTransport> transport,
                           ConnectGloo(store, options));
  return std::shared_ptr<Communicator>(
      std::make_shared<HierarchicalCommunicator>(
          options, std::move(domain), std::move(memory), std::move(transport)));
}

}  // namespace tessera
