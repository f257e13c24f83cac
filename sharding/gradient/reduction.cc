#include "sharding/gradient/reduction.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace tessera {

absl::StatusOr<std::unique_ptr<Reduction>> Reduction::Start(
    std::vector<FlatGradient*> flats, MeanOptions mean) {
  std::unique_ptr<Reduction> reduction(new Reduction(std::move(flats), mean));
  TESSERA_RETURN_IF_ERROR(reduction->flats_.size() == 1
                              ? reduction->StartAlone()
                              : reduction->StartPacked());
  return reduction;
}

absl::Status Reduction::StartAlone() {
  const FlatParameter& flat = flats_[0]->flat();
  const CommTag tag{
      absl::StrCat("reduction of the gradients of unit ", flat.name())};
  TESSERA_ASSIGN_OR_RETURN(const at::Tensor whole,
                           flats_[0]->Outgoing(mean_.predivide));
  TESSERA_ASSIGN_OR_RETURN(const at::Tensor mine,
                           flats_[0]->PlaceOfSums(whole));
  done_ = StartSum(flat, whole, mine, tag, mean_.divisor);
  sums_.push_back(mine);
  return absl::OkStatus();
}

// By rank, then by unit: each rank's shards lie together.
absl::Status Reduction::StartPacked() {
  const FlatParameter& first = flats_[0]->flat();
  Communicator* comm = first.communicator();
  const bool sharded = first.stage().sharded_optimizer;
  const int64_t parts = sharded ? comm->world_size() : 1;
  int64_t part = 0;  // elements of one rank
  for (FlatGradient* u : flats_) part += u->flat().owned().numel();
  TESSERA_ASSIGN_OR_RETURN(
      packed_,
      FlatBuffer::Allocate(part * parts, first.reduce_dtype(), first.device(),
                           MemoryKind::kGradients, Fill::kNone));
  const at::Tensor packed = packed_.View().view({parts, part});
  int64_t at = 0;
  for (FlatGradient* u : flats_) {
    const int64_t n = u->flat().owned().numel();
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor whole,
                             u->Outgoing(mean_.predivide));
    packed.narrow(1, at, n).copy_(whole.view({parts, n}));
    u->DropOutgoing();
    at += n;
  }
  const CommTag tag{absl::StrCat("reduction of the gradients of ",
                                 flats_.size(), " units, ", first.name(),
                                 " to ", flats_.back()->flat().name())};
  at::Tensor mine = packed_.View();
  if (sharded) mine = packed.select(0, comm->rank());
  done_ = StartSum(first, packed_.View(), mine, tag, mean_.divisor);
  at = 0;
  for (FlatGradient* u : flats_) {
    const int64_t n = u->flat().owned().numel();
    sums_.push_back(mine.narrow(0, at, n));
    at += n;
  }
  return absl::OkStatus();
}

absl::Status Reduction::Finish() {
  TESSERA_RETURN_IF_ERROR(done_.Wait());
  for (size_t i = 0; i < flats_.size(); ++i) {
    TESSERA_RETURN_IF_ERROR(
        flats_[i]->TakeSums(sums_[i], mean_.divisor / done_.divided_by));
  }
  return absl::OkStatus();
}

}  // namespace tessera
