#include "comm/make_group.h"

#include <utility>

#include "absl/status/status.h"
#include "base/log.h"
#include "base/status.h"
#include "comm/gloo_communicator.h"
#include "comm/hierarchical_communicator.h"
#include "comm/local_address.h"
#include "comm/nccl_communicator.h"
#include "comm/shm_communicator.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"

namespace tessera {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

HierarchicalOptions OverGloo(const GroupPlan& plan) {
  const int rank = plan.options.rank;
  HierarchicalOptions options{{plan.options}, MemoryGroups(plan.cards)};
  options.same_host = FindNeighbours(plan.cards, rank).same_host;
  if (!options.same_host) {
    options.address = ChooseAddress(
        plan.cards, rank, [](const auto& host) { return AddressToward(host); });
    TESSERA_VLOG(comm, 1) << "gloo listens at '" << options.address << "'";
  }
  return options;
}

}  // namespace

absl::StatusOr<std::shared_ptr<Communicator>> MakeGroup(const GroupPlan& plan,
                                                        StorePtr store) {
  TESSERA_ASSIGN_OR_RETURN(
      const std::string backend,
      ChooseBackend(plan.cards, plan.backend, BuiltWithNccl()));
  if (backend == "nccl") {
    NcclCommunicatorOptions nccl{plan.options};
    nccl.device = plan.device;
    nccl.ordered_sums = plan.ordered_sums;
    return MakeNcclCommunicator(std::move(store), nccl);
  }
  // Where memory cannot be shared, which all ranks see alike.
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
    auto memory = MeetOnHosts(store, gloo);
    if (memory.ok()) {
      return MakeHierarchicalCommunicator(std::move(store), gloo,
                                          *std::move(memory));
    }
    if (!falls_back(memory.status())) return memory.status();
  }
  return MakeGlooCommunicator(std::move(store), gloo);
}

}  // namespace tessera
