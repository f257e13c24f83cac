// The kinds of collectives, with their names in messages and tables, and what
// their time and waits count as.
//
// A new one is two lines here, a method of Communicator, what its arguments
// must be (comm/comm_call.cc), and what each transport does for it
// (comm/transport.h), unless it only moves parts between ranks (PartsOf).
#ifndef COMM_COLLECTIVE_H_
#define COMM_COLLECTIVE_H_

#include <cstdint>

#include "absl/strings/string_view.h"
#include "base/trace/exposed.h"

namespace tessera {

enum class CollectiveOp : int32_t {
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kBroadcast,
  kAllToAll,
  kSendReceive,
  kBarrier,
  kText,  // an agreement: strings of any length
  kPull,  // no collective: comm/shard_server.h
};
inline constexpr int kNumCollectiveOps = 9;

struct CollectiveTraits {
  absl::string_view name;  // "all-gather", "reduce-scatter", ..., "agreement"
  bool sums = false;
  // How often the busiest link carries (W-1)/W of the tensor, as nccl-tests
  // count it; 0: it carries the tensor once, whatever W is.
  int bus_passes = 0;
  // What a wait for it counts as, unless its caller says otherwise.
  WaitReason waited_as = WaitReason::kOther;
};
inline constexpr CollectiveTraits kCollectiveTraits[kNumCollectiveOps] = {
    {"all-gather", false, 1, WaitReason::kGather},
    {"reduce-scatter", true, 1, WaitReason::kReduction},
    {"all-reduce", true, 2, WaitReason::kReduction},
    {"broadcast"},
    {"all-to-all", false, 1},
    {"send-receive"},
    {"barrier"},
    {"agreement", false, 0, WaitReason::kAgreement},
    {"pull", false, 0, WaitReason::kGather},
};

inline const CollectiveTraits& TraitsOf(CollectiveOp op) {
  return kCollectiveTraits[static_cast<int>(op)];
}
inline absl::string_view CollectiveName(CollectiveOp op) {
  return TraitsOf(op).name;
}

}  // namespace tessera
#endif  // COMM_COLLECTIVE_H_
