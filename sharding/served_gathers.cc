#include "sharding/served_gathers.h"

#include <utility>

namespace tessera {

void ServedGathers::Offer(int64_t key, at::Tensor shard) {
  absl::MutexLock lock(&mutex_);
  if (server_ != nullptr) server_->Offer(key, std::move(shard));
}

void ServedGathers::EndUpdate() {
  absl::MutexLock lock(&mutex_);
  if (server_ != nullptr) server_->SetVersion(++version_);
}

absl::StatusOr<CommFuture> ServedGathers::Pull(int64_t key, at::Tensor whole,
                                               CommTag tag) {
  absl::MutexLock lock(&mutex_);
  if (server_ != nullptr) {
    return server_->Pull(key, version_, std::move(whole), std::move(tag));
  }
  return absl::FailedPreconditionError(
      "the engine is being closed: its parameters are not gathered any more");
}

void ServedGathers::Stop() {
  std::unique_ptr<ShardServer> server;
  {
    absl::MutexLock lock(&mutex_);
    server = std::move(server_);
  }
}

}  // namespace tessera
