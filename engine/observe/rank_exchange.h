// RankExchange: exchanges each rank's metrics of a step between all ranks.
//
// Why it is late: a step's numbers are known when it has ended, and the next
// forward is to begin at once. So one small all-gather is queued at the end of
// a Step, which all ranks have agreed on, and the next Step waits for it, when
// it has long been done. A loss on a device has to reach the host first,
// without the host waiting for it: on a device the all-gather is queued one
// Step later, and its result is used another Step later.
#ifndef ENGINE_OBSERVE_RANK_EXCHANGE_H_
#define ENGINE_OBSERVE_RANK_EXCHANGE_H_

#include <optional>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "base/stream/stream_point.h"
#include "comm/communicator.h"
#include "engine/observe/step_record.h"

namespace tessera {

// Adds up the losses of a step, on the device where they are.
class LossSum {
 public:
  // Adds a loss of one element, multiplied by `times`. ASYNC on a device.
  // LOCAL.
  void Add(const at::Tensor& loss, double times);
  void Clear() { *this = LossSum(); }
  bool any() const { return any_; }
  // Starts the copy to the host, where the sum is on a device. ASYNC. LOCAL.
  void Send();
  // Waits until the sum is on the host, and returns it. REQUIRES: Send. LOCAL.
  double Take();

 private:
  bool on_host() const { return !on_device_.defined(); }

  bool any_ = false;
  double host_ = 0;
  at::Tensor on_device_;  // [], float64
  at::Tensor arriving_;   // the same, in page-locked memory
  StreamPoint arrived_;
};

class RankExchange {
 public:
  RankExchange(RankMetrics mine, LossSum loss);

  // Queues the all-gather. COLLECTIVE, ASYNC. The loss is waited for.
  void Start(Communicator* comm);
  bool started() const { return started_; }
  // Returns the metrics of all ranks, or this rank's only if there was no
  // all-gather or it failed. Blocks until the all-gather has ended, if it was
  // started. LOCAL.
  std::vector<RankMetrics> Finish(int world_size);

 private:
  RankMetrics mine_;
  LossSum loss_;
  bool started_ = false;
  at::Tensor shard_, whole_;
  CommFuture future_;
};

}  // namespace tessera
#endif  // ENGINE_OBSERVE_RANK_EXCHANGE_H_
