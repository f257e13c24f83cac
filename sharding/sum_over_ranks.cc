#include "sharding/sum_over_ranks.h"

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace tessera {

absl::Status SumOverRanks::Wait() const {
  TESSERA_RETURN_IF_ERROR(within_group.Wait());
  return over_replicas.Wait();
}

SumOverRanks StartSum(const Unit& unit, const at::Tensor& whole,
                      const at::Tensor& mine, const CommTag& tag) {
  SumOverRanks sum;
  Communicator* const group = unit.communicator();
  sum.within_group = unit.stage().sharded_optimizer
                         ? group->ReduceScatterSum(whole, mine, tag)
                         : group->AllReduceSum(mine, tag);
  // In the order of the calls, so after it.
  if (unit.replicas() != nullptr) {
    sum.over_replicas = unit.replicas()->AllReduceSum(
        mine, CommTag(absl::StrCat(tag.what, ", over replicas"), tag.site));
  }
  return sum;
}

}  // namespace tessera
