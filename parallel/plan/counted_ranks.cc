#include "parallel/plan/counted_ranks.h"

#include <algorithm>
#include <string>
#include <vector>

#include "base/torch/torch_scope.h"
#include "comm/collective.h"
#include "comm/comm_call.h"

namespace tessera {

// What receives is written by operators, so that a trace sees that its values
// depend on what was sent.
CommFuture CountedRanks::Start(CommCall call, CommTag /*tag*/) {
  ++collectives_;
  if (call.texts != nullptr) {
    *call.texts =
        std::vector<std::string>(static_cast<size_t>(ranks_), call.text);
    return {};
  }
  if (!call.out.defined()) return {};
  TorchScope scope;
  const auto bytes = static_cast<int64_t>(call.whole().nbytes());
  bytes_ += bytes;
  const int passes = std::max(TraitsOf(call.op).bus_passes, 1);
  sent_bytes_ += static_cast<double>(passes) * static_cast<double>(bytes) *
                 (ranks_ - 1) / ranks_;
  at::Tensor in = call.in;
  if (in.defined() && in.storage().unsafeGetStorageImpl() ==
                          call.out.storage().unsafeGetStorageImpl()) {
    in = in.clone();  // its own slice of what receives
  }
  if (call.op == CollectiveOp::kAllGather) {
    call.out.view({ranks_, -1}).copy_(in.reshape({-1}));
  } else if (call.op == CollectiveOp::kReduceScatter) {
    call.out.copy_(in.view({ranks_, -1}).select(0, 0).view_as(call.out));
  } else if (call.op == CollectiveOp::kAllToAll) {
    call.out.copy_(in.view_as(call.out));
  }
  return {};
}

}  // namespace tessera
