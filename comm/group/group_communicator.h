// GroupCommunicator: the communicator of a group of ranks over any transport.
// It checks arguments, queues each collective on the communication thread, has
// the wait in it watched (comm/watch/wait_monitor.h), keeps the first failure
// and tells the others of it, and records what each collective was and took.
//
//   AllGather(...) --check--> CommThread --monitor--> Transport::Run(call)
//
// Tensors of a device go through a copy in host memory where the transport
// works there. Where it gives a collective to a device, that has been done when
// the future ends; its end there is watched on a thread of its own.
#ifndef COMM_GROUP_GROUP_COMMUNICATOR_H_
#define COMM_GROUP_GROUP_COMMUNICATOR_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/capabilities.h"
#include "comm/comm_call.h"
#include "comm/communicator.h"
#include "comm/group_options.h"
#include "comm/note_board.h"
#include "comm/record/comm_log.h"
#include "comm/record/flight_recorder.h"
#include "comm/shard_server.h"
#include "comm/transport.h"
#include "comm/watch/failure_domain.h"

namespace tessera {

// Makes the record of a collective on `tensor`, the whole one.
CollectiveRecord RecordOf(CollectiveOp op, const at::Tensor& tensor);

class GroupCommunicator;

// Some of a group's ranks, this one among them.
struct Subgroup {
  std::string parent_backend;  // the whole group's
  std::vector<int> ranks;      // of the whole, ascending
  GroupOptions options;
};

// Functions that make further groups and servers, so that a group need not know
// backends and servers; all COLLECTIVE, blocking.
struct GroupMakers {
  // For Communicator::Split; a group without it cannot be split.
  std::function<absl::StatusOr<std::shared_ptr<Communicator>>(const Subgroup&)>
      subgroup;
  // For Communicator::ServeShards; a group without it cannot serve.
  std::function<absl::StatusOr<std::unique_ptr<ShardServer>>(
      GroupCommunicator* group, const CommTag& tag)>
      shard_server;
};

class GroupCommunicator
    : public Communicator,
      public std::enable_shared_from_this<GroupCommunicator> {
 public:
  // `domain` is that of FailureDomain::Join; null in a group of one that fails
  // alone. `transport` is connected. LOCAL. ResourceExhausted if there is no
  // thread to watch a device.
  static absl::StatusOr<std::shared_ptr<GroupCommunicator>> Create(
      const GroupOptions& options, GroupMakers makers,
      std::shared_ptr<FailureDomain> domain,
      std::shared_ptr<Transport> transport);
  ~GroupCommunicator() override;

  int rank() const final { return options_.rank; }
  int world_size() const final { return options_.world_size; }
  absl::string_view backend() const final { return transport_->name(); }
  Capabilities capabilities() const final { return can_; }

  CommFuture Start(CommCall call, CommTag tag) final;

  absl::StatusOr<std::shared_ptr<Communicator>> Split(int color,
                                                      CommTag name) override;
  absl::StatusOr<std::unique_ptr<SharedMemory>> ShareMemory(int64_t bytes,
                                                            CommTag tag) final {
    return transport_->ShareMemory(this, bytes, tag);
  }
  absl::StatusOr<std::unique_ptr<ShardServer>> ServeShards(CommTag tag) final;
  absl::StatusOr<std::unique_ptr<NoteBoard>> ShareNotes(CommTag tag) override;

  void Announce(const absl::Status& status) final {
    if (domain_ != nullptr) domain_->Announce(status);
  }
  bool AllAnnounced(absl::Duration timeout) override {
    return domain_->announcements().AllPosted(timeout, watched_->ranks);
  }
  void ClearAnnouncement() final {
    if (domain_ != nullptr) domain_->announcements().Retract();
  }

  std::string Report() const final { return log_->ToText(backend()); }
  std::string ShortReport() const final {
    return log_->ToText(backend(), /*least_share=*/0.01);
  }
  std::vector<absl::Duration> WaitedFor() const final { return log_->waits(); }

  // Returns the first failure of all groups that fail together; OK if there was
  // none. LOCAL.
  absl::Status failure() const { return failure_->Get(); }
  // The last collectives of this rank, and what all of them cost.
  const FlightRecorder& recorder() const { return recorder_; }
  const CommLog& log() const { return *log_; }

  // ---- for classes that do some of the group's work (comm/serve, comm/world)

  const GroupOptions& options() const { return options_; }
  const std::shared_ptr<FailureDomain>& domain() const { return domain_; }
  const std::shared_ptr<Transport>& transport() const { return transport_; }
  // For work that is not a collective, but is recorded and counted with them.
  FlightRecorder* records() { return &recorder_; }
  CommLog* costs() { return log_.get(); }
  // Continues the count of `other`, a group of the same ranks and name.
  void CountOnFrom(const GroupCommunicator& other) {
    sequence_ = other.sequence_.load();
  }

 protected:
  GroupCommunicator(const GroupOptions& options, GroupMakers makers,
                    std::shared_ptr<FailureDomain> domain,
                    std::shared_ptr<Transport> transport);

 private:
  // Runs a recorded collective, from its turn to its end.
  absl::Status RunCall(CollectiveRecord record, CommCall* call,
                       const std::function<absl::Status()>& body);
  // Runs a call by the transport, through a copy in host memory where it needs
  // one.
  absl::Status RunWatched(const CommCall& call);
  // Runs `body` under `monitor`. Returns OK if it does, otherwise the best
  // reason known.
  absl::Status Watched(WaitMonitor* monitor, const CommCall& call,
                       const std::function<absl::Status()>& body);
  // A rank that failed is soon in another collective than the others: what it
  // announces says more than that.
  absl::Status WithTheCause(const absl::Status& mismatch);
  // Starts to watch the end of a device's work, which is then recorded.
  absl::Status WatchDevice(const CollectiveRecord& record,
                           std::function<absl::Status()> end);
  absl::Status AwaitDevice(const CommCall& call,
                           const std::function<absl::Status()>& end);
  void FailOnDevice(const absl::Status& why);
  // Records the end of a collective.
  absl::Status Note(CollectiveRecord record, absl::Status status);
  WaitListener MakeListener() const;
  // This rank's subgroup, by the colors of all ranks.
  Subgroup SubgroupOf(const std::string& name,
                      const std::vector<std::string>& colors) const;

  const GroupOptions options_;
  const GroupMakers makers_;
  const std::shared_ptr<FailureDomain> domain_;
  const std::shared_ptr<Transport> transport_;
  const Capabilities can_;
  // Collectives run in the call, on the caller's thread, several at a time: in
  // a group of one, which waits for nobody, and whose collectives need not stay
  // in order with those of other groups.
  const bool in_call_;
  const std::shared_ptr<FirstFailure> failure_;
  const std::shared_ptr<const WatchedGroup> watched_;
  FlightRecorder recorder_;
  const std::shared_ptr<CommLog> log_;
  std::atomic<bool> device_failed_{false};
  std::atomic<int64_t> sequence_{0};
  std::atomic<int> splits_{0};
  std::atomic<int> boards_{0};
};

}  // namespace tessera
#endif  // COMM_GROUP_GROUP_COMMUNICATOR_H_
