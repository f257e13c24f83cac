// Gradients: the way of all gradients from autograd to the owners' shards.
//
//   hook on a parameter -> its place in the unit's local flat gradient [P]
//   unit complete       -> sum over ranks, in rank order; the owner keeps [S]
//   end of backward     -> agreement of all ranks; division by W; added to the
//                          gradients of the step's earlier micro-batches
//
// A hook's call is not "the last gradient": a parameter used in two reentrant
// checkpoints fires twice. So a unit is complete early only if each expected
// parameter has arrived in the outermost graph task and nothing hints at a
// reentrant checkpoint (the unit was used outside of any graph); otherwise at
// the end of backward.
//
// Collectives of one backward, the same on all ranks whatever their graphs
// were:
//   1. every unit with expected parameters, in reverse order of registration;
//   2. the agreement (error, which parameters got a gradient anywhere);
//   3. units with held gradients: of parameters that were not expected, or that
//      came after their unit was launched.
// Expected are the parameters that got a gradient on any rank in the last
// backward (at first: those that require one), which all ranks know.
//
// Threads: hooks may run on any thread; the other calls come from one.
#ifndef SHARDING_GRADIENTS_H_
#define SHARDING_GRADIENTS_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "comm/communicator.h"
#include "sharding/unit.h"
#include "sharding/unit_gradient.h"

namespace tessera {

class Gradients {
 public:
  // Installs a hook on every parameter, frozen ones too (they may be unfrozen);
  // hooks found there are chained. `expected[i]`: parameter i of the model
  // requires a gradient on some rank, the same on all ranks. LOCAL.
  Gradients(const std::vector<std::shared_ptr<Unit>>& units,
            std::shared_ptr<Communicator> comm, std::vector<bool> expected);
  ~Gradients();  // takes the hooks away. LOCAL
  Gradients(const Gradients&) = delete;
  Gradients& operator=(const Gradients&) = delete;

  // Runs `backward` and reduces what it and any bare backward before it left.
  // `position` says where in the training this rank is: FailedPrecondition if
  // the others are elsewhere.
  // On an error of any rank every rank returns it, the micro-batch's gradients
  // are dropped, and those of earlier micro-batches stay. COLLECTIVE.
  absl::Status Reduce(const std::function<void()>& backward,
                      absl::string_view position);

  // Drops everything. LOCAL.
  void Zero();

  // By unit, in the model's order.
  const UnitGradient& of(size_t unit) const { return *units_[unit]; }

  // FailedPrecondition naming a parameter with a gradient that Reduce has not
  // seen: of a bare loss.backward(), or put there by hand. LOCAL.
  absl::Status CheckNothingPending() const;

  // FailedPrecondition naming the parameter whose hook was replaced since, or
  // whose storage is no longer the unit's. LOCAL.
  absl::Status CheckAttached() const;

  // Bytes of gradients that stay allocated between uses.
  int64_t resident_bytes() const;

 private:
  class ArrivalHook;

  void Arrived(int unit, int parameter, const at::Tensor& tensor);
  absl::Status LaunchReady(bool all);
  absl::Status FinishAll();
  absl::Status AgreeOnFailing(const absl::Status& mine);
  absl::Status Agree(const absl::Status& mine, absl::string_view position,
                     std::vector<bool>* arrived, std::vector<bool>* held);
  absl::Status Commit(const std::vector<bool>& arrived,
                      const std::vector<bool>& held);
  void Discard();

  std::shared_ptr<Communicator> comm_;
  std::vector<std::unique_ptr<UnitGradient>> units_;
  absl::Mutex mutex_;     // hooks against each other
  bool running_ = false;  // within Reduce
  size_t cursor_ = 0;     // units launched, from the last backwards
  std::deque<UnitGradient*> in_flight_;
};

}  // namespace tessera
#endif  // SHARDING_GRADIENTS_H_
