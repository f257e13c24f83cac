#include "sharding/copy/served_gathers.h"

#include <utility>

#include "absl/time/time.h"
#include "base/status.h"
#include "comm/serve/retired_servers.h"

namespace tessera {
namespace {

// Ranks mostly end together.
constexpr absl::Duration kPatience = absl::Milliseconds(200);

}  // namespace

void ServedGathers::Offer(int64_t key, at::Tensor shard) {
  absl::MutexLock lock(&mutex_);
  if (server_ != nullptr) server_->Offer(key, std::move(shard));
}

void ServedGathers::BeginUpdate() {
  absl::MutexLock lock(&mutex_);
  if (server_ != nullptr) server_->OrderAfterReads();
}

void ServedGathers::EndUpdate() {
  absl::MutexLock lock(&mutex_);
  if (server_ != nullptr) server_->SetVersion(++version_);
}

absl::StatusOr<CommFuture> ServedGathers::Pull(int64_t key, at::Tensor whole,
                                               CommTag tag) {
  absl::MutexLock lock(&mutex_);
  TESSERA_RETURN_IF_ERROR(failed_);
  if (server_ != nullptr) {
    return server_->Pull(key, version_, std::move(whole), std::move(tag));
  }
  return absl::FailedPreconditionError(
      "the engine is being closed: its parameters are not gathered any more");
}

void ServedGathers::FailUpdate(const absl::Status& why) {
  absl::MutexLock lock(&mutex_);
  failed_.Update(why);
}

void ServedGathers::Stop() {
  std::unique_ptr<ShardServer> server;
  {
    absl::MutexLock lock(&mutex_);
    server = std::move(server_);
  }
  if (server == nullptr) return;
  RetireServer(
      std::move(server), [self = shared_from_this()] { self->End(); },
      kPatience);
}

void ServedGathers::End() {
  absl::MutexLock lock(&mutex_);
  server_ = nullptr;
  kept_.clear();
  ended_ = true;
}

void ServedGathers::Keep(FlatBuffer shard) {
  absl::MutexLock lock(&mutex_);
  if (!ended_) kept_.push_back(std::move(shard));
}

}  // namespace tessera
