#include "engine/model/write_checks.h"

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/bits.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "comm/all_gather_values.h"
#include "sharding/flat/placed_writes.h"

namespace tessera {
namespace {

// Returns fingerprints of this rank's masters in the units of `which`.
absl::StatusOr<std::vector<uint64_t>> FingerprintsOf(
    const std::vector<std::shared_ptr<FlatParameter>>& flats,
    const std::vector<bool>& which) {
  TorchScope scope;
  std::vector<uint64_t> prints;
  for (size_t u = 0; u < flats.size(); ++u) {
    if (!which[u]) continue;
    TESSERA_ASSIGN_OR_RETURN(const RaisedValue value,
                             flats[u]->states().RaiseValue());
    const at::Tensor bytes = value.View().cpu();
    prints.push_back(Fingerprint(bytes.const_data_ptr(),
                                 static_cast<int64_t>(bytes.nbytes())));
  }
  return prints;
}

}  // namespace

// What ranks have written to since the last call joins what is not verified.
// Whether that is anything. COLLECTIVE.
absl::StatusOr<bool> WriteChecks::NoteWritten() {
  std::vector<uint8_t> written;
  for (const auto& flat : model_->flats()) {
    written.push_back(flat->writes().TakeTakenOver() ? 1 : 0);
  }
  TESSERA_ASSIGN_OR_RETURN(
      const auto all, AllGatherValues(model_->comm(), written,
                                      CommTag{"which units were written to"}));
  unverified_.resize(model_->flats().size());
  bool any = false;
  for (size_t u = 0; u < unverified_.size(); ++u) {
    for (const auto& theirs : all) {
      if (theirs[u] != 0) unverified_[u] = true;
    }
    any |= unverified_[u];
  }
  return any;
}

absl::Status WriteChecks::CheckReplicas() {
  if (model_->replicas() == nullptr) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(const bool any, NoteWritten());
  if (!any) return absl::OkStatus();
  const auto& flats = model_->flats();
  const absl::StatusOr<std::vector<uint64_t>> prints =
      CatchTorch("comparison of replicas",
                 [&] { return FingerprintsOf(flats, unverified_); });
  if (!prints.ok()) {
    model_->comm()->Announce(prints.status());
    return prints.status();
  }
  TESSERA_ASSIGN_OR_RETURN(const auto all,
                           AllGatherValues(model_->comm(), *prints,
                                           CommTag{"comparison of replicas"}));
  const auto n =
      all.size() / static_cast<size_t>(model_->mesh().size(kDpReplicate));
  for (size_t rank = n; rank < all.size(); ++rank) {
    size_t at = 0;
    for (size_t u = 0; u < flats.size(); ++u) {
      if (!unverified_[u]) continue;
      const bool equal = all[rank][at] == all[rank % n][at];
      ++at;
      if (equal) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          "[", flats[u]->name(),
          "] what was written into parameters of the unit (the first is '",
          flats[u]->parameters()[0].name, "') differs between rank ", rank % n,
          " and rank ", rank,
          ", which hold replicas of one shard "
          "(sharding.shard_group_size ",
          model_->mesh().size(kDpShard),
          "); make the same writes on all ranks, or call Engine::SetMaster or "
          "LoadCheckpoint to make them equal again"));
    }
  }
  unverified_.assign(flats.size(), false);
  return absl::OkStatus();
}

absl::Status WriteChecks::CheckBeforeStep() {
  TESSERA_RETURN_IF_ERROR(CheckWrites());
  return CheckReplicas();
}

absl::Status WriteChecks::CheckBeforeSave() {
  if (model_->comm()->world_size() == 1) return absl::OkStatus();
  std::string mine;
  for (const auto& flat : model_->flats()) mine += flat->TakePlacedWrites();
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<std::string> all,
      model_->summing()->AllGatherStrings(
          mine, CommTag{"comparison of what operators wrote"}));
  const std::vector<absl::string_view> writes(all.begin(), all.end());
  TESSERA_RETURN_IF_ERROR(ComparePlacedWrites(writes, "before saving"));
  return CheckReplicas();
}

absl::Status WriteChecks::CheckWrites() {
  if (!check_writes_) return absl::OkStatus();
  const auto& flats = model_->flats();
  std::vector<uint64_t> written;
  for (const auto& flat : flats)
    written.push_back(flat->writes().TakeFingerprint());
  TESSERA_ASSIGN_OR_RETURN(
      const auto all,
      AllGatherValues(model_->summing().get(), written,
                      CommTag{"comparison of what was written"}));
  for (size_t rank = 1; rank < all.size(); ++rank) {
    for (size_t u = 0; u < flats.size(); ++u) {
      if (all[rank][u] == all[0][u]) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          "[", flats[u]->name(),
          "] what was written into parameters of the "
          "unit (the first is '",
          flats[u]->parameters()[0].name,
          "') since the last Step differs between rank 0 and rank ", rank,
          "; make the same writes on all ranks"));
    }
  }
  return absl::OkStatus();
}

}  // namespace tessera
