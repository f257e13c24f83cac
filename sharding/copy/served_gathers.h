// ServedGathers: one-sided gathers of an engine's flats: each rank reads the
// others' shards when it needs them (comm/shard_server.h), whatever the others
// do meanwhile.
//
// A version is an update of all ranks: between two EndUpdates an owner changes
// its shards only after every rank has entered the update
// (engine/model/exclusive_scope.h sees to that).
//
// Threads: any.
#ifndef SHARDING_COPY_SERVED_GATHERS_H_
#define SHARDING_COPY_SERVED_GATHERS_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "base/layout/flat_buffer.h"
#include "comm/communicator.h"
#include "comm/shard_server.h"

namespace tessera {

class ServedGathers : public std::enable_shared_from_this<ServedGathers> {
 public:
  explicit ServedGathers(std::unique_ptr<ShardServer> server)
      : server_(std::move(server)) {}

  // Offers this rank's shard of a flat. `key` means the same flat on all ranks;
  // `shard` is valid until Keep. LOCAL.
  void Offer(int64_t key, at::Tensor shard);
  // All ranks have entered the update: orders what the current stream changes
  // from here on after the reads of it. LOCAL.
  void BeginUpdate();
  // Publishes this rank's shards with their new values. LOCAL; call it once per
  // update on every rank, the first time before any Pull.
  void EndUpdate();
  // Fills `whole` with all ranks' shards as of the last update. LOCAL, ASYNC.
  // Errors: FailedPrecondition after Stop; FailUpdate's `why`.
  absl::StatusOr<CommFuture> Pull(int64_t key, at::Tensor whole, CommTag tag);
  // Makes every later Pull return `why`: this rank could not do its part of an
  // update. LOCAL.
  void FailUpdate(const absl::Status& why);
  // Ends this rank's pulls. Others may still read what it offered, until they
  // have stopped, too. LOCAL; waits a moment for them.
  void Stop();
  // Ends serving: all ranks have agreed that nobody reads any more, or have
  // stopped. LOCAL.
  void End();
  // Takes ownership of memory that was offered, for as long as it may be read.
  // LOCAL.
  void Keep(FlatBuffer shard);

 private:
  absl::Mutex mutex_;
  std::unique_ptr<ShardServer> server_ ABSL_GUARDED_BY(mutex_);
  int64_t version_ ABSL_GUARDED_BY(mutex_) = -1;
  absl::Status failed_ ABSL_GUARDED_BY(mutex_);
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<FlatBuffer> kept_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tessera
#endif  // SHARDING_COPY_SERVED_GATHERS_H_
