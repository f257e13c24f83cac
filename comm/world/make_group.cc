#include "comm/world/make_group.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/log.h"
#include "base/status.h"
#include "base/thread/deadline.h"
#include "base/torch_guard.h"
#include "comm/cuda_ipc/cuda_ipc_communicator.h"
#include "comm/gloo/gloo_communicator.h"
#include "comm/group/queued_communicator.h"
#include "comm/group/self_communicator.h"
#include "comm/hierarchical/hierarchical_communicator.h"
#include "comm/nccl/nccl_communicator.h"
#include "comm/rendezvous/abandonable.h"
#include "comm/rendezvous/local_address.h"
#include "comm/serve/tcp_shard_server.h"
#include "comm/shm/shm_communicator.h"
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

HierarchicalOptions OverGloo(const GroupPlan& plan) {
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

absl::StatusOr<std::shared_ptr<Communicator>> MakeWith(
    absl::string_view backend, const GroupPlan& plan, StorePtr store);

// nccl or cuda_ipc, over a group of the same ranks that works in host memory;
// for cuda_ipc in memory that they share.
absl::StatusOr<std::shared_ptr<Communicator>> MakeOfGpus(
    absl::string_view of_gpus, const GroupPlan& plan, const StorePtr& store) {
  GroupPlan host = plan;
  host.backend = of_gpus == "nccl" ? "auto" : "shm";
  host.options.make_subgroup = nullptr;
  host.options.make_shard_server = nullptr;
  TESSERA_ASSIGN_OR_RETURN(
      host.options.domain,
      FailureDomain::Join(
          store, plan.options,
          FindNeighbours(plan.infos, plan.options.rank).same_host));
  TESSERA_ASSIGN_OR_RETURN(
      const std::string backend,
      ChooseBackend(plan.infos, host.backend, /*built_with_nccl=*/false));
  TESSERA_ASSIGN_OR_RETURN(
      const std::shared_ptr<Communicator> made,
      MakeWith(backend, host,
               c10::make_intrusive<c10d::PrefixStore>("host", store)));
  const auto queued = std::dynamic_pointer_cast<QueuedCommunicator>(made);
  if (of_gpus == "cuda_ipc") {
    CudaIpcCommunicatorOptions ipc{plan.options};
    ipc.device = plan.device;
    return MakeCudaIpcCommunicator(ipc, host.options.domain, queued);
  }
  NcclCommunicatorOptions nccl{plan.options};
  nccl.device = plan.device;
  nccl.ordered_sums = plan.ordered_sums;
  return MakeNcclCommunicator(store, nccl, host.options.domain, queued);
}

absl::StatusOr<std::shared_ptr<Communicator>> MakeWith(
    absl::string_view backend, const GroupPlan& plan, StorePtr store) {
  if (backend == "self") return MakeSelfCommunicator(plan.options);
  if (backend == "nccl" || backend == "cuda_ipc") {
    return MakeOfGpus(backend, plan, store);
  }
  // Where memory cannot be shared, which all ranks see the same way.
  const auto falls_back = [&](const absl::Status& status) {
    if (!absl::IsUnavailable(status) || plan.backend != "auto") return false;
    TESSERA_LOG(WARNING) << status.message() << "; taking gloo";
    store = c10::make_intrusive<c10d::PrefixStore>("gloo", store);
    return true;
  };
  if (backend == "shm") {
    auto made = MakeShmCommunicator(store, plan.options);
    if (made.ok() || !falls_back(made.status())) return made;
  }
  const HierarchicalOptions gloo = OverGloo(plan);
  if (backend == "hierarchical") {
    auto memory = ConnectHosts(store, gloo);
    if (memory.ok()) {
      return MakeHierarchicalCommunicator(std::move(store), gloo,
                                          *std::move(memory));
    }
    if (!falls_back(memory.status())) return memory.status();
  }
  return MakeGlooCommunicator(std::move(store), gloo);
}

// `plan`, able to make subgroups of its group, whose keys are in `store`.
GroupPlan WithSubgroups(const GroupPlan& plan,
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
  plan = WithSubgroups(plan, store);
  TESSERA_VLOG(comm, 1) << "group " << plan.options.name << " of ranks "
                        << absl::StrJoin(plan.options.first_ranks, ", ") << ", "
                        << plan.backend;
  auto made = std::make_shared<std::shared_ptr<Communicator>>();
  auto work = [made, plan, client = store->clone()]() -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(*made,
                             MakeWith(plan.backend, plan,
                                      c10::make_intrusive<c10d::PrefixStore>(
                                          plan.options.name, client)));
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

GroupPlan WithSubgroups(const GroupPlan& plan,
                        const c10::intrusive_ptr<SubgroupStore>& store) {
  GroupPlan result = plan;
  result.options.make_shard_server = MakeTcpShardServer;
  result.options.make_subgroup = [plan, store](const Subgroup& subgroup) {
    return MakeSubgroup(plan, store, subgroup);
  };
  return result;
}

}  // namespace

absl::StatusOr<std::shared_ptr<Communicator>> MakeGroup(const GroupPlan& plan,
                                                        StorePtr store,
                                                        StorePtr client) {
  TESSERA_ASSIGN_OR_RETURN(
      const std::string backend,
      ChooseBackend(plan.infos, plan.backend, BuiltWithNccl()));
  const auto subgroups = c10::make_intrusive<SubgroupStore>(std::move(client));
  return MakeWith(backend, WithSubgroups(plan, subgroups), std::move(store));
}

}  // namespace tessera
