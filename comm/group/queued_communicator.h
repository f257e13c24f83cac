// QueuedCommunicator: what all backends share. It checks arguments, queues each
// collective on the communication thread, keeps the first failure, and records
// what each collective was and took (recorder, log).
//
//   AllGather(...) --check--> CommThread --> DoAllGather(...) of the backend
//
// Backends see valid, non-empty arguments only, on one thread, one call at a
// time, and with world_size() > 1 (except SelfCommunicator). Those that work in
// host memory see CPU tensors only: tensors of other devices go through a copy.
// Those that give a collective to a device return when that is done; its end
// there is watched on a thread of its own (TakeDeviceEnd).
#ifndef COMM_GROUP_QUEUED_COMMUNICATOR_H_
#define COMM_GROUP_QUEUED_COMMUNICATOR_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "comm/communicator.h"
#include "comm/record/comm_log.h"
#include "comm/record/flight_recorder.h"
#include "comm/watch/first_failure.h"

namespace tessera {

// What the recorder is told of a collective on `tensor`, the whole one.
CollectiveRecord RecordOf(CollectiveOp op, const at::Tensor& tensor);

class QueuedCommunicator
    : public Communicator,
      public std::enable_shared_from_this<QueuedCommunicator> {
 public:
  int rank() const final { return membership_.rank; }
  int world_size() const final { return membership_.world_size; }

  CommFuture AllGather(at::Tensor shard, at::Tensor whole, CommTag tag) final;
  using Communicator::ReduceScatterSum;
  CommFuture ReduceScatterSum(at::Tensor whole, at::Tensor shard, CommTag tag,
                              double divisor) final;
  CommFuture AllReduceSum(at::Tensor tensor, CommTag tag) final;
  CommFuture Broadcast(at::Tensor tensor, int root, CommTag tag) final;
  absl::StatusOr<std::vector<std::string>> AllGatherStrings(
      absl::string_view mine, CommTag tag) final;

  std::string Report() const override { return log_.ToText(backend()); }
  std::vector<absl::Duration> WaitedFor() const override {
    return log_.waits();
  }

  // The first failure, of any of those that fail together; OK while there was
  // none. LOCAL.
  absl::Status failure() const { return membership_.failure->Get(); }

  // The last collectives of this rank, and what all of them cost.
  const FlightRecorder& recorder() const { return recorder_; }
  const CommLog& log() const { return log_; }

  // One call of a collective. Ranks whose calls match have the same.
  struct Call {
    using Op = CollectiveOp;
    Op op = Op::kText;
    std::string what;        // the tag's, or the op's name; and which group's
    int64_t sequence = 0;    // counts this communicator's collectives from 1
    uint32_t signature = 0;  // of all the ranks must agree on; 31 bits
    // "all-reduce sum, 4000 bytes of float32".
    std::string details;
  };

 protected:
  // Which tensors a backend works on.
  enum class TensorsSeen { kAny, kOnHost };

  // What a communicator is a rank of.
  struct Membership {
    int rank = 0;
    int world_size = 1;
    std::string group;                      // as GroupOptions::name
    std::shared_ptr<FirstFailure> failure;  // null: one of its own
    TensorsSeen tensors = TensorsSeen::kAny;
    // Collectives run in the call instead, on the caller's thread, several at a
    // time: for a group of one, which waits for nobody, and whose collectives
    // need not stay in order with those of other groups.
    bool in_call = false;
  };
  explicit QueuedCommunicator(Membership membership);

  // For backends that can tell: the collective under way was blocked for
  // `waited` until the first bytes of `peer` came.
  void NoteWait(int peer, absl::Duration waited) { log_.AddWait(peer, waited); }

  // For what is no collective, but is recorded and counted with them.
  FlightRecorder* records() { return &recorder_; }
  CommLog* costs() { return &log_; }

  // Queues a collective that `record` describes, on tensors of `device`.
  using Body = std::function<absl::Status(const Call&)>;
  CommFuture Enqueue(CollectiveRecord record, CommTag tag, Body body,
                     c10::Device device = at::kCPU);
  // The collective has ended with `status`. Where that is OK and it was given
  // to a device: what blocks until the device has done it, and says how it
  // ended, on the thread that watches devices; else null.
  virtual Body TakeDeviceEnd(const absl::Status& /*status*/) { return nullptr; }
  // Counts on from where `other` is, as a group of the same ranks and name.
  void CountOnFrom(const QueuedCommunicator& other) {
    sequence_ = other.sequence_.load();
  }
  // Tells the others of an error of these, unless they have been told.
  virtual void TellFailure(const absl::Status&) {}

 public:
  // The backend's side of each collective, on the communication thread: blocks
  // until its result may be read by any thread; of tensors of a device, by what
  // their current stream does next. An error makes this communicator failed,
  // and those that share its failure.
  virtual absl::Status DoAllGather(const Call& call, const at::Tensor& shard,
                                   const at::Tensor& whole) = 0;
  // The sum, and then DivideBy (base/torch/divide.h) or what has its bits.
  virtual absl::Status DoReduceScatter(const Call& call,
                                       const at::Tensor& whole,
                                       const at::Tensor& shard,
                                       double divisor) = 0;
  virtual absl::Status DoAllReduceSum(const Call& call,
                                      const at::Tensor& tensor) = 0;
  virtual absl::Status DoBroadcast(const Call& call, const at::Tensor& tensor,
                                   int root) = 0;
  virtual absl::StatusOr<std::vector<std::string>> DoAllGatherStrings(
      const Call& call, const std::string& mine) = 0;

 private:
  // These go through a copy in host memory where the backend wants that.
  absl::Status RunAllGather(const Call& call, const at::Tensor& shard,
                            const at::Tensor& whole);
  absl::Status RunReduceScatter(const Call& call, const at::Tensor& whole,
                                const at::Tensor& shard, double divisor);
  // The same for collectives that write the tensor that they read.
  absl::Status RunInPlace(
      const at::Tensor& tensor,
      const std::function<absl::Status(const at::Tensor&)>& collective);
  bool NeedsCopy(const at::Tensor& t) const {
    return membership_.tensors == TensorsSeen::kOnHost && !t.is_cpu();
  }
  absl::Status RunCall(CollectiveRecord record, const Body& body);
  // Has the end of what a device was given watched, and then noted.
  absl::Status WatchDevice(const CollectiveRecord& record, const Call& call,
                           Body end);
  // The collective has ended.
  absl::Status Note(CollectiveRecord record, absl::Status status);

  const Membership membership_;
  FlightRecorder recorder_;
  CommLog log_;
  std::atomic<int64_t> sequence_{0};
};

}  // namespace tessera
#endif  // COMM_GROUP_QUEUED_COMMUNICATOR_H_
