#include "engine/model/sharded_model.h"

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace tessera {

absl::Status ShardedModel::MakeMesh(int pipeline_ranks, int sequence_ranks,
                                    int tensor_ranks) {
  const int summing = job_->world_size() / (pipeline_ranks * tensor_ranks);
  TESSERA_ASSIGN_OR_RETURN(
      mesh_,
      Mesh::Create(
          job_, {{std::string(kPp), pipeline_ranks, "stages"},
                 {std::string(kDpCp), summing, "data parallel ranks"},
                 {std::string(kTp), tensor_ranks, "tensor parallel ranks"}}));
  TESSERA_RETURN_IF_ERROR(mesh_->Divide(
      kDpCp,
      {{std::string(kDp), summing / sequence_ranks, "data parallel ranks"},
       {std::string(kCp), sequence_ranks, "sequence parallel ranks"}}));
  TESSERA_RETURN_IF_ERROR(mesh_->MakeGroup(kDpCp));
  TESSERA_RETURN_IF_ERROR(mesh_->MakeGroup(kDp));
  if (sequence_ranks > 1) TESSERA_RETURN_IF_ERROR(mesh_->MakeGroup(kCp));
  if (pipeline_ranks > 1) TESSERA_RETURN_IF_ERROR(mesh_->MakeGroup(kPp));
  return tensor_ranks == 1 ? absl::OkStatus() : mesh_->MakeGroup(kTp);
}

absl::Status ShardedModel::MakeShardGroups(int shards) {
  TESSERA_RETURN_IF_ERROR(mesh_->Divide(
      kDpCp,
      {{std::string(kDpReplicate), mesh_->size(kDpCp) / shards, "replicas"},
       {std::string(kDpShard), shards, "shard groups"}}));
  TESSERA_RETURN_IF_ERROR(mesh_->MakeGroup(kDpShard));
  if (mesh_->size(kDpReplicate) == 1) return absl::OkStatus();
  return mesh_->MakeGroup(kDpReplicate);
}

void ShardedModel::Add(std::shared_ptr<FlatParameter> flat) {
  const auto& parameters = flat->parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    places_[parameters[i].name] = {static_cast<int>(flats_.size()),
                                   static_cast<int>(i)};
  }
  flats_.push_back(std::move(flat));
}

at::Device ShardedModel::device() const {
  return flats_.empty() ? at::Device(at::kCPU) : flats_[0]->device();
}

absl::StatusOr<ParameterRef> ShardedModel::Find(absl::string_view name) const {
  const auto place = places_.find(std::string(name));
  if (place != places_.end()) return place->second;
  return absl::NotFoundError(absl::StrCat(
      "the engine has no parameter '", name,
      "' (ignored ones, and those without elements, are the "
      "module's own; names are those of named_parameters(); a tied one goes "
      "by its first)"));
}

absl::StatusOr<FlatParameter*> ShardedModel::FindFlat(
    absl::string_view name) const {
  for (const auto& flat : flats_) {
    if (flat->name() == name) return flat.get();
  }
  return absl::NotFoundError(absl::StrCat(
      "there is no unit '", name, "'; Engine::DescribeUnits lists them"));
}

}  // namespace tessera
