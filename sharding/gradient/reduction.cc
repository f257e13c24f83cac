#include "sharding/gradient/reduction.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/trace/trace.h"

namespace tessera {

absl::StatusOr<std::unique_ptr<Reduction>> Reduction::Start(
    std::vector<FlatGradient*> flats, MeanOptions mean) {
  std::unique_ptr<Reduction> reduction(new Reduction(std::move(flats), mean));
  if (TraceRecords()) reduction->begun_ = TraceNow();
  if (reduction->flats_.size() > 1) {
    TESSERA_RETURN_IF_ERROR(reduction->StartPacked());
    return reduction;
  }
  TESSERA_ASSIGN_OR_RETURN(const at::Tensor whole,
                           reduction->flats_[0]->Outgoing(mean.predivide));
  TESSERA_RETURN_IF_ERROR(reduction->StartAlone(whole, "the gradients"));
  return reduction;
}

absl::StatusOr<std::unique_ptr<Reduction>> Reduction::StartHeld(
    FlatGradient* flat, MeanOptions mean) {
  std::unique_ptr<Reduction> reduction(new Reduction({flat}, mean));
  TESSERA_ASSIGN_OR_RETURN(const at::Tensor whole,
                           flat->OutgoingHeld(mean.predivide));
  TESSERA_RETURN_IF_ERROR(reduction->StartAlone(whole, "late gradients"));
  return reduction;
}

absl::Status Reduction::StartAlone(const at::Tensor& whole,
                                   absl::string_view what) {
  const FlatParameter& flat = flats_[0]->flat();
  const CommTag tag{
      absl::StrCat("reduction of ", what, " of unit ", flat.name())};
  TESSERA_ASSIGN_OR_RETURN(const at::Tensor mine,
                           flats_[0]->PlaceOfSums(whole));
  StartSum(flat, whole, mine, tag);
  sums_.push_back(mine);
  return absl::OkStatus();
}

// By rank, then by flat: each rank's shards lie together, so that one
// reduce-scatter brings every rank its own of all flats. Sums are taken element
// by element, so packing changes no bits.
absl::Status Reduction::StartPacked() {
  const TraceScope trace(TraceTrack::kReduce, "pack gradients");
  const FlatParameter& first = flats_[0]->flat();
  Communicator* comm = first.communicator();
  const bool sharded = first.stage().sharded_optimizer;
  const int64_t shards = sharded ? comm->world_size() : 1;
  int64_t shard_numel = 0;  // of one rank, in all flats
  for (FlatGradient* flat : flats_) shard_numel += flat->flat().owned().numel();
  TESSERA_ASSIGN_OR_RETURN(
      packed_, FlatBuffer::Allocate(shard_numel * shards, first.reduce_dtype(),
                                    first.device(), MemoryKind::kGradients,
                                    Fill::kNone));
  const at::Tensor packed = packed_.View().view({shards, shard_numel});
  int64_t at = 0;
  for (FlatGradient* flat : flats_) {
    const int64_t n = flat->flat().owned().numel();
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor whole,
                             flat->Outgoing(mean_.predivide));
    packed.narrow(1, at, n).copy_(whole.view({shards, n}));
    flat->DropOutgoing();
    at += n;
  }
  const CommTag tag{absl::StrCat("reduction of the gradients of ",
                                 flats_.size(), " units, ", first.name(),
                                 " to ", flats_.back()->flat().name())};
  at::Tensor mine = packed_.View();
  if (sharded) mine = packed.select(0, comm->rank());
  StartSum(first, packed_.View(), mine, tag);
  at = 0;
  for (FlatGradient* flat : flats_) {
    const int64_t n = flat->flat().owned().numel();
    sums_.push_back(mine.narrow(0, at, n));
    at += n;
  }
  return absl::OkStatus();
}

void Reduction::StartSum(const FlatParameter& flat, const at::Tensor& whole,
                         const at::Tensor& mine, const CommTag& tag) {
  Communicator* const group = flat.communicator();
  if (flat.stage().sharded_optimizer) {
    // A sum of another dtype is rounded to that first, and divided in this one.
    if (flat.replicas() == nullptr &&
        whole.scalar_type() == flat.step_dtype()) {
      divided_by_ = mean_.divisor;
    }
    within_group_ = group->ReduceScatterSum(whole, mine, tag, divided_by_);
  } else {
    within_group_ = group->AllReduceSum(mine, tag);
  }
  // In the order of the calls, so after it: on a device both are sums, of one
  // lane.
  if (flat.replicas() != nullptr) {
    over_replicas_ = flat.replicas()->AllReduceSum(
        mine, CommTag(absl::StrCat(tag.what, ", over replicas"), tag.site));
  }
}

absl::Status Reduction::Finish() {
  TESSERA_RETURN_IF_ERROR(within_group_.Wait());
  TESSERA_RETURN_IF_ERROR(over_replicas_.Wait());
  for (size_t i = 0; i < flats_.size(); ++i) {
    TESSERA_RETURN_IF_ERROR(
        flats_[i]->TakeSums(sums_[i], mean_.divisor / divided_by_));
  }
  if (begun_ != 0) Trace();
  return absl::OkStatus();
}

// From its start until its sums are taken.
void Reduction::Trace() const {
  std::string units = flats_[0]->flat().name();
  if (flats_.size() > 1) {
    absl::StrAppend(&units, " to ", flats_.back()->flat().name());
  }
  int64_t bytes = 0;
  for (const at::Tensor& sum : sums_) {
    bytes += static_cast<int64_t>(sum.nbytes());
  }
  AddTraceSpan({TraceTrack::kReduce, absl::StrCat("reduce ", units), begun_,
                TraceNow(), units, bytes,
                absl::StrCat("\"flats\":", flats_.size())});
}

}  // namespace tessera
