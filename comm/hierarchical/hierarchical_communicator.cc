#include "comm/hierarchical/hierarchical_communicator.h"

#include <cstring>
#include <functional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "comm/gloo/gloo_messages.h"
#include "comm/group/host_communicator.h"
#include "comm/hierarchical/hierarchical_ops.h"
#include "comm/hierarchical/host_plan.h"
#include "comm/reduce/element_type.h"
#include "comm/reduce/slices.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace tessera {
namespace {

// Strings one after the other, each behind its length.
std::string Pack(const std::vector<std::string>& texts) {
  std::string packed;
  for (const std::string& text : texts) {
    const uint64_t bytes = text.size();
    packed.append(reinterpret_cast<const char*>(&bytes), sizeof(bytes));
    packed += text;
  }
  return packed;
}

std::vector<std::string> Unpack(absl::string_view packed) {
  std::vector<std::string> texts;
  while (!packed.empty()) {
    uint64_t bytes;
    std::memcpy(&bytes, packed.data(), sizeof(bytes));
    texts.emplace_back(packed.substr(sizeof(bytes), bytes));
    packed.remove_prefix(sizeof(bytes) + bytes);
  }
  return texts;
}

class HierarchicalCommunicator : public HostCommunicator {
 public:
  HierarchicalCommunicator(const HierarchicalOptions& options,
                           std::shared_ptr<FailureDomain> domain,
                           std::shared_ptr<ShmMemory> memory,
                           std::shared_ptr<GlooTransport> transport)
      : HostCommunicator(options, std::move(domain),
                         [memory, transport] {
                           memory->team.Abort(absl::CancelledError("aborted"));
                           transport->Abort();
                         }),
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
    group_.exchange->SetNames(local_names);
    memory_->team.SetOnSleep(
        [this](int peer) { SetAwaited(LocalRanks()[peer]); });
    memory_->team.SetGone([this, local_names](int peer) {
      return memory_->team.HasLeft(peer) ? HasEnded(local_names[peer], true)
                                         : EndOf(LocalRanks()[peer]);
    });
    for (int h = 0; h < placement_.num_hosts(); ++h) {
      leaders_.push_back(placement_.ranks_of(h).front());
    }
  }

  absl::string_view backend() const override { return "hierarchical"; }

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
  const std::vector<int>& LocalRanks() const {
    return placement_.ranks_of(placement_.host_of(rank()));
  }
  // Runs `body` under the monitor. `memory` is what messages may point into.
  absl::Status Run(const Call& call, std::vector<at::Tensor> memory,
                   const std::function<absl::Status()>& body);
  // An operation on `tensor`, one part for each rank.
  PartsCall PartsOf(const Call& call, const at::Tensor& tensor) const;
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
      const std::vector<absl::Duration> waits = memory_->team.TakeWaits();
      for (size_t i = 0; i < waits.size(); ++i) {
        if (waits[i] > absl::ZeroDuration())
          NoteWait(LocalRanks()[i], waits[i]);
      }
      return status;
    });
  });
}

PartsCall HierarchicalCommunicator::PartsOf(const Call& call,
                                            const at::Tensor& tensor) const {
  PartsCall result;
  result.what = call.what;
  result.signature = call.signature;
  result.data = static_cast<char*>(tensor.mutable_data_ptr());
  const auto element_bytes = static_cast<int64_t>(tensor.element_size());
  int owner = 0;
  for (const Slice& slice : Slices(tensor.numel(), world_size())) {
    result.parts.push_back(
        {slice.begin * element_bytes, slice.numel * element_bytes, owner++});
  }
  return result;
}

absl::Status HierarchicalCommunicator::HostAllGather(const Call& call,
                                                     const at::Tensor& shard,
                                                     const at::Tensor& whole) {
  PartsCall parts = PartsOf(call, whole);
  parts.op = shm::Op::kAllGather;
  char* const own = parts.data + parts.parts[rank()].begin;
  if (own != shard.const_data_ptr()) {
    std::memcpy(own, shard.const_data_ptr(), shard.nbytes());
  }
  return Run(call, {whole}, [&] { return GatherParts(group_, parts); });
}

absl::Status HierarchicalCommunicator::HostReduceScatterSum(
    const Call& call, const at::Tensor& whole, const at::Tensor& shard) {
  PartsCall parts = PartsOf(call, whole);
  parts.op = shm::Op::kReduceScatter;
  TESSERA_ASSIGN_OR_RETURN(parts.type, ElementTypeOf(whole.scalar_type()));
  return Run(call, {whole, shard}, [&] {
    return SumParts(group_, parts,
                    static_cast<char*>(shard.mutable_data_ptr()));
  });
}

absl::Status HierarchicalCommunicator::HostAllReduceSum(
    const Call& call, const at::Tensor& tensor) {
  PartsCall parts = PartsOf(call, tensor);
  parts.op = shm::Op::kAllReduce;
  TESSERA_ASSIGN_OR_RETURN(parts.type, ElementTypeOf(tensor.scalar_type()));
  return Run(call, {tensor}, [&]() -> absl::Status {
    TESSERA_RETURN_IF_ERROR(
        SumParts(group_, parts, parts.data + parts.parts[rank()].begin));
    return GatherParts(group_, parts);
  });
}

absl::Status HierarchicalCommunicator::HostBroadcast(const Call& call,
                                                     const at::Tensor& tensor,
                                                     int root) {
  PartsCall parts = PartsOf(call, tensor);
  parts.op = shm::Op::kBroadcast;
  parts.root = root;
  parts.parts = {{0, static_cast<int64_t>(tensor.nbytes()), root}};
  return Run(call, {tensor}, [&] { return GatherParts(group_, parts); });
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
      memory_->collectives.AllGatherTexts(call.what, mine, &local));
  std::string packed;
  if (rank() == LocalRanks().front()) {
    TESSERA_ASSIGN_OR_RETURN(
        const std::vector<std::string> hosts,
        messages_.GatherTexts(call.signature, leaders_, Pack(local)));
    packed = Pack(hosts);
  }
  TESSERA_RETURN_IF_ERROR(
      memory_->collectives.AllGatherTexts(call.what, packed, &local));
  const std::vector<std::string> hosts = Unpack(local.front());
  for (int h = 0; h < placement_.num_hosts(); ++h) {
    const std::vector<std::string> of_host = Unpack(hosts[h]);
    for (size_t i = 0; i < of_host.size(); ++i) {
      (*texts)[placement_.ranks_of(h)[i]] = of_host[i];
    }
  }
  return absl::OkStatus();
}

// Every rank's word about its meeting; all return the same.
absl::Status AgreeOnMeetings(c10d::Store& store,
                             const HierarchicalOptions& options,
                             const absl::Status& mine) {
  const std::string text = mine.ok() ? "" : std::string(mine.message());
  store.set(absl::StrCat("meeting/", options.rank),
            std::vector<uint8_t>(text.begin(), text.end()));
  absl::Status all;
  for (int r = 0; r < options.world_size; ++r) {
    const std::string key = absl::StrCat("meeting/", r);
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
    return AgreeOnMeetings(*store->clone(), options, memory.status());
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
