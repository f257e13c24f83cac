// ServedGathers: how the flats of an engine are gathered where a gather is no
// collective: each rank reads the others' shards when it needs them
// (comm/shard_server.h), whatever those do meanwhile.
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

  // `key` means the same flat on all ranks; `shard` is valid until Keep. LOCAL.
  void Offer(int64_t key, at::Tensor shard);
  // This rank's shards have what the update made of them. LOCAL, once an update
  // on every rank; the first time before any Pull.
  void EndUpdate();
  // whole = all ranks' shards as of the last update. LOCAL, ASYNC.
  // FailedPrecondition after Stop, and what FailUpdate was given.
  absl::StatusOr<CommFuture> Pull(int64_t key, at::Tensor whole, CommTag tag);
  // This rank could not do its part of an update, and pulls no more: `why` is
  // what Pull returns. LOCAL.
  void FailUpdate(const absl::Status& why);
  // This rank pulls no more. Others may still read what it offered, until they
  // have stopped, too. LOCAL; waits a moment for them.
  void Stop();
  // Nobody reads any more: all ranks have agreed on that, or have stopped.
  // LOCAL.
  void End();
  // Takes memory that was offered over, for as long as it may be read. LOCAL.
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
