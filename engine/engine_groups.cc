// Which ranks shard, which hold replicas of each other, and that these stay
// equal (sharding.shard_group_size).
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/bits.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "engine/engine_impl.h"
#include "sharding/torch/torch_scope.h"

namespace tessera {
namespace {

// Of this rank's masters of each of these units, one after another.
std::string FingerprintsOf(
    const std::vector<std::shared_ptr<FlatParameter>>& flats,
    const std::vector<bool>& which) {
  TorchScope scope;
  std::string prints;
  for (size_t u = 0; u < flats.size(); ++u) {
    if (!which[u]) continue;
    const at::Tensor bytes = flats[u]->masters().cpu();
    const uint64_t print = Fingerprint(bytes.const_data_ptr(),
                                       static_cast<int64_t>(bytes.nbytes()));
    prints.append(reinterpret_cast<const char*>(&print), sizeof(print));
  }
  return prints;
}

}  // namespace

// Neighbours shard; where nothing is sharded all ranks are one group.
absl::Status Engine::Impl::MakeGroups() {
  const int n = settings_.shard_group_size;
  shard_group_ = comm_;
  if (stage_ == 0 || n == comm_->world_size()) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(
      shard_group_, comm_->Split(comm_->rank() / n, CommTag{"shard groups"}));
  TESSERA_ASSIGN_OR_RETURN(
      replicas_, comm_->Split(comm_->rank() % n, CommTag{"replicas"}));
  return absl::OkStatus();
}

// What all ranks of a shard group have come to is agreed on over the groups.
absl::Status Engine::Impl::AgreeOverGroups(const absl::Status& mine,
                                           absl::string_view where) {
  return replicas_ == nullptr ? mine : comm_->AgreeOk(mine, where);
}

// Null if what a forward leaves is sharded over all ranks of a shard group.
absl::StatusOr<std::shared_ptr<Communicator>> Engine::Impl::ReshardGroup() {
  const int n = settings_.reshard_group_size;
  if (n == 0 || n == shard_group_->world_size() || stage_ < 3) return nullptr;
  auto group = shard_group_->Split(shard_group_->rank() / n,
                                   CommTag{"groups to reshard to"});
  TESSERA_RETURN_IF_ERROR(
      AgreeOverGroups(group.status(), "sharding.reshard_after_forward"));
  return group;
}

// All that could part replicas is a write of the user's: gradients have the
// same bits on all of them, and so have the steps. So units that some rank has
// written to are compared, until they are equal. REQUIRES: PrepareUpdate of
// all. The same on all ranks. COLLECTIVE: one small exchange, two if anything
// was written.
absl::Status Engine::Impl::CheckReplicas() {
  if (replicas_ == nullptr) return absl::OkStatus();
  std::string written;
  for (const auto& flat : flats_) {
    written.push_back(flat->TakeWrittenTo() ? '1' : '0');
  }
  TESSERA_ASSIGN_OR_RETURN(
      auto all,
      comm_->AllGatherStrings(written, CommTag{"which units were written to"}));
  bool any = false;
  unverified_replicas_.resize(flats_.size());
  for (size_t u = 0; u < flats_.size(); ++u) {
    for (const std::string& theirs : all) {
      if (theirs[u] == '1') unverified_replicas_[u] = true;
    }
    any |= unverified_replicas_[u];
  }
  if (!any) return absl::OkStatus();
  std::string prints;
  const absl::Status printed = CatchTorch("comparison of replicas", [&] {
    prints = FingerprintsOf(flats_, unverified_replicas_);
  });
  if (!printed.ok()) {
    comm_->Announce(printed);
    return printed;
  }
  TESSERA_ASSIGN_OR_RETURN(
      all, comm_->AllGatherStrings(prints, CommTag{"comparison of replicas"}));
  const auto n = static_cast<size_t>(shard_group_->world_size());
  for (size_t rank = n; rank < all.size(); ++rank) {
    size_t at = 0;
    for (size_t u = 0; u < flats_.size(); ++u) {
      if (!unverified_replicas_[u]) continue;
      const bool equal = all[rank].compare(at, sizeof(uint64_t), all[rank % n],
                                           at, sizeof(uint64_t)) == 0;
      at += sizeof(uint64_t);
      if (equal) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          "[", flats_[u]->name(),
          "] what was written into parameters of the unit (the first is '",
          flats_[u]->parameters()[0].name, "') differs between rank ", rank % n,
          " and rank ", rank,
          ", which hold replicas of one shard "
          "(sharding.shard_group_size ",
          n,
          "); make the same writes on all ranks, or call Engine::SetMaster or "
          "LoadCheckpoint to make them equal again"));
    }
  }
  unverified_replicas_.assign(flats_.size(), false);
  return absl::OkStatus();
}

}  // namespace tessera
