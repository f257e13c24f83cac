// RankExchange: what each rank tells of a step, on its way to all of them.
//
// Why late. A step's numbers are there when it has ended, and the next forward
// is to begin at once. So they go by one small all-gather, queued at the end of
// a Step, which all ranks have agreed on, and waited for by the next one, when
// it has long been done. A loss on a device has to come to the host before
// that, without the host waiting for it: an engine of a device queues it at the
// end of the Step after, and tells it another one later.
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

// The losses of a step, added up where they are.
class LossSum {
 public:
  // A loss of one element, `times` so often. ASYNC on a device. LOCAL.
  void Add(const at::Tensor& loss, double times);
  void Clear() { *this = LossSum(); }
  bool any() const { return any_; }
  // On its way to the host, where it is on a device. ASYNC. LOCAL.
  void Send();
  // REQUIRES: Send. Waits until it is on the host. LOCAL.
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
  // Those of all ranks; of this rank alone where they have not come. Blocks
  // until the all-gather has ended, if it was started. LOCAL.
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
