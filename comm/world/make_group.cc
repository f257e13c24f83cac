#include "comm/world/make_group.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "base/log.h"
#include "base/status.h"
#include "base/thread/deadline.h"
#include "base/torch_guard.h"
#include "comm/cuda_ipc/cuda_ipc_transport.h"
#include "comm/gloo/gloo_transport.h"
#include "comm/group/group_communicator.h"
#include "comm/group/self_communicator.h"
#include "comm/hierarchical/hierarchical_transport.h"
#include "comm/nccl/nccl_environment.h"
#include "comm/nccl/nccl_transport.h"
#include "comm/rendezvous/abandonable.h"
#include "comm/rendezvous/local_address.h"
#include "comm/serve/tcp_shard_server.h"
#include "comm/shm/shm_transport.h"
#include "comm/watch/failure_domain.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"

namespace tessera {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// How soon the end of a rank is known after what it breaks.
constexpr absl::Duration kNewsTime = absl::Milliseconds(200);

// Where subgroups are made, one after the other: clones are the same client. A
// new one would be a connection more for each of them. Not thread-safe; another
// thread takes a clone.
class SubgroupStore : public c10d::PrefixStore {
 public:
  explicit SubgroupStore(StorePtr client)
      : PrefixStore("subgroups", std::move(client)) {}
  StorePtr clone() override {
    return c10::make_intrusive<SubgroupStore>(store_);
  }
  // Later groups use another client: an abandoned thread may still wait in the
  // old one, and calls of one client wait for each other.
  void TakeNewClient() { store_ = store_->clone(); }
};

// A group's ranks, about to be connected.
struct Connection {
  const GroupPlan& plan;
  StorePtr store;  // for this group's keys alone
  // Set where all ranks have found that they cannot share memory.
  bool cannot_share = false;
  // A group of the same ranks in host memory, which transports of devices use.
  std::shared_ptr<GroupCommunicator> host;
};
using Connector =
    absl::StatusOr<std::shared_ptr<Transport>> (*)(Connection* ranks);

absl::StatusOr<std::shared_ptr<GroupCommunicator>> MakeOver(
    std::string backend, const GroupPlan& plan, StorePtr store,
    GroupMakers makers);

HierarchicalOptions GlooOptionsOf(const GroupPlan& plan) {
  const int rank = plan.options.rank;
  HierarchicalOptions options{{plan.options}, MemoryGroups(plan.infos)};
  options.same_host = FindNeighbours(plan.infos, rank).same_host;
  if (!options.same_host) {
    options.address = ChooseAddress(
        plan.infos, rank, [](const auto& host) { return AddressToward(host); });
    TESSERA_VLOG(comm, 1) << "gloo listens at '" << options.address << "'";
  }
  return options;
}

absl::StatusOr<std::shared_ptr<Transport>> ConnectByMemory(Connection* ranks) {
  auto made = ConnectShmTransport(ranks->store, ranks->plan.options);
  ranks->cannot_share = absl::IsUnavailable(made.status());
  return made;
}

absl::StatusOr<std::shared_ptr<Transport>> ConnectByGloo(Connection* ranks) {
  return ConnectGlooTransport(ranks->store, GlooOptionsOf(ranks->plan));
}

absl::StatusOr<std::shared_ptr<Transport>> ConnectByHosts(Connection* ranks) {
  const HierarchicalOptions options = GlooOptionsOf(ranks->plan);
  auto memory = ConnectHosts(ranks->store, options);
  ranks->cannot_share = absl::IsUnavailable(memory.status());
  TESSERA_RETURN_IF_ERROR(memory.status());
  return ConnectHierarchicalTransport(ranks->store, options,
                                      *std::move(memory));
}

// `backend`: "shm", or "auto" for what fits ranks without GPUs.
absl::Status ConnectHost(Connection* ranks, const std::string& backend) {
  GroupPlan host = ranks->plan;
  host.backend = backend;
  TESSERA_ASSIGN_OR_RETURN(
      const std::string chosen,
      ChooseBackend(host.infos, backend, /*built_with_nccl=*/false));
  TESSERA_ASSIGN_OR_RETURN(
      ranks->host,
      MakeOver(chosen, host,
               c10::make_intrusive<c10d::PrefixStore>("host", ranks->store),
               {}));
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Transport>> ConnectByNccl(Connection* ranks) {
  TESSERA_RETURN_IF_ERROR(ConnectHost(ranks, "auto"));
  const GroupPlan& plan = ranks->plan;
  NcclOptions options;
  options.rank = plan.options.rank;
  options.world_size = plan.options.world_size;
  options.device = plan.device;
  options.ordered_sums = plan.ordered_sums;
  // Environments may differ.
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<std::string> orders,
      ranks->host->AllGatherStrings(StartInHostOrder() ? "" : "other",
                                    {"lanes of nccl"}));
  options.sums_apart =
      std::all_of(orders.begin(), orders.end(),
                  [](const std::string& order) { return order.empty(); });
  return ConnectNcclTransport(ranks->store, options, ranks->host->transport());
}

absl::StatusOr<std::shared_ptr<Transport>> ConnectByCudaIpc(Connection* ranks) {
  TESSERA_RETURN_IF_ERROR(ConnectHost(ranks, "shm"));
  CudaIpcOptions options;
  options.rank = ranks->plan.options.rank;
  options.world_size = ranks->plan.options.world_size;
  options.device = ranks->plan.device;
  return ConnectCudaIpcTransport(options, ranks->host.get(),
                                 ranks->host->transport());
}

Connector ConnectorOf(const std::string& backend) {
  static const auto* const connectors = new std::map<std::string, Connector>{
      {"shm", ConnectByMemory},         {"gloo", ConnectByGloo},
      {"hierarchical", ConnectByHosts}, {"nccl", ConnectByNccl},
      {"cuda_ipc", ConnectByCudaIpc},
  };
  return connectors->at(backend);
}

// `plan.options.domain` is set.
absl::StatusOr<std::shared_ptr<GroupCommunicator>> MakeOver(
    std::string backend, const GroupPlan& plan, StorePtr store,
    GroupMakers makers) {
  Connection ranks{plan, std::move(store)};
  auto transport = ConnectorOf(backend)(&ranks);
  if (!transport.ok() && ranks.cannot_share && plan.backend == "auto") {
    TESSERA_LOG(WARNING) << transport.status().message() << "; taking gloo";
    ranks.store = c10::make_intrusive<c10d::PrefixStore>("gloo", ranks.store);
    transport = ConnectByGloo(&ranks);
  }
  TESSERA_RETURN_IF_ERROR(transport.status());
  TESSERA_ASSIGN_OR_RETURN(
      auto group,
      GroupCommunicator::Create(plan.options, std::move(makers),
                                plan.options.domain, *std::move(transport)));
  if (ranks.host != nullptr) group->CountOnFrom(*ranks.host);
  return group;
}

absl::StatusOr<std::shared_ptr<Communicator>> MakeWith(
    const std::string& backend, GroupPlan plan, StorePtr store,
    GroupMakers makers) {
  if (backend == "self") return MakeSelfCommunicator(plan.options);
  // First: when all are connected, what each has put there can be read.
  TESSERA_ASSIGN_OR_RETURN(
      plan.options.domain,
      FailureDomain::Join(
          store, plan.options,
          FindNeighbours(plan.infos, plan.options.rank).same_host));
  return MakeOver(backend, plan, std::move(store), std::move(makers));
}

// For a group of `plan`, whose subgroups' keys are in `store`.
GroupMakers MakersOf(const GroupPlan& plan,
                     const c10::intrusive_ptr<SubgroupStore>& store);

// Why it can be abandoned: connecting blocks inside Gloo and NCCL, which know
// nothing of ranks that ended; so the work runs on a thread of its own, and
// this one looks meanwhile whether a rank of the subgroup has ended or
// announced a failure. The limit of time is shorter than that of a collective,
// since ranks of other subgroups already wait in the agreement that follows.
absl::StatusOr<std::shared_ptr<Communicator>> MakeSubgroup(
    const GroupPlan& whole, const c10::intrusive_ptr<SubgroupStore>& store,
    const Subgroup& subgroup) {
  GroupPlan plan = whole;
  plan.options = subgroup.options;
  plan.infos.clear();
  for (int r : subgroup.ranks) plan.infos.push_back(whole.infos[r]);
  plan.backend = BackendOfSubgroup(subgroup.parent_backend, plan.infos);
  const absl::Duration patience = std::min(plan.options.connect_timeout,
                                           plan.options.collective_timeout / 2);
  plan.options.connect_timeout = patience;
  TESSERA_VLOG(comm, 1) << "group " << plan.options.name << " of ranks "
                        << absl::StrJoin(plan.options.first_ranks, ", ") << ", "
                        << plan.backend;
  auto made = std::make_shared<std::shared_ptr<Communicator>>();
  auto work = [made, plan, makers = MakersOf(plan, store),
               client = store->clone()]() -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(*made,
                             MakeWith(plan.backend, plan,
                                      c10::make_intrusive<c10d::PrefixStore>(
                                          plan.options.name, client),
                                      makers));
    return absl::OkStatus();
  };
  const Deadline deadline = Deadline::After(patience);
  const auto stop = [&]() -> absl::Status {
    TESSERA_RETURN_IF_ERROR(
        plan.options.domain->TroubleOf(plan.options.first_ranks));
    if (!deadline.HasPassed()) return absl::OkStatus();
    return absl::DeadlineExceededError(
        absl::StrCat("not connected within ", absl::FormatDuration(patience)));
  };
  const absl::Status status = RunAbandonable(work, stop);
  if (status.ok()) return *made;
  store->TakeNewClient();
  // A transport that cannot connect does not know that a rank has ended.
  (void)plan.options.domain->announcements().liveness().WaitForEnd(kNewsTime);
  TESSERA_RETURN_IF_ERROR(
      plan.options.domain->TroubleOf(plan.options.first_ranks));
  return status;
}

GroupMakers MakersOf(const GroupPlan& plan,
                     const c10::intrusive_ptr<SubgroupStore>& store) {
  GroupMakers makers;
  makers.shard_server = MakeTcpShardServer;
  makers.subgroup = [plan, store](const Subgroup& subgroup) {
    return MakeSubgroup(plan, store, subgroup);
  };
  return makers;
}

}  // namespace

absl::StatusOr<std::shared_ptr<Communicator>> MakeGroup(const GroupPlan& plan,
                                                        StorePtr store,
                                                        StorePtr client) {
  TESSERA_ASSIGN_OR_RETURN(
      const std::string backend,
      ChooseBackend(plan.infos, plan.backend, BuiltWithNccl()));
  const auto subgroups = c10::make_intrusive<SubgroupStore>(std::move(client));
  return MakeWith(backend, plan, std::move(store), MakersOf(plan, subgroups));
}

}  // namespace tessera
