#include "sharding/gradient/sum_over_ranks.h"

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace tessera {

absl::Status SumOverRanks::Wait() const {
  TESSERA_RETURN_IF_ERROR(within_group.Wait());
  return over_replicas.Wait();
}

SumOverRanks StartSum(const FlatParameter& flat, const at::Tensor& whole,
                      const at::Tensor& mine, const CommTag& tag,
                      double divisor) {
  SumOverRanks sum;
  Communicator* const group = flat.communicator();
  if (flat.stage().sharded_optimizer) {
    // A sum of another dtype is rounded to that first, and divided in this one.
    if (flat.replicas() == nullptr &&
        whole.scalar_type() == flat.step_dtype()) {
      sum.divided_by = divisor;
    }
    sum.within_group =
        group->ReduceScatterSum(whole, mine, tag, sum.divided_by);
  } else {
    sum.within_group = group->AllReduceSum(mine, tag);
  }
  // In the order of the calls, so after it.
  if (flat.replicas() != nullptr) {
    sum.over_replicas = flat.replicas()->AllReduceSum(
        mine, CommTag(absl::StrCat(tag.what, ", over replicas"), tag.site));
  }
  return sum;
}

}  // namespace tessera
