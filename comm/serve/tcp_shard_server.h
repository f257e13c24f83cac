// TcpShardServer: a ShardServer over connections between all ranks.
//
//   caller   Pull --> pulls_, asks_ --wake--> "tessera-shards" --> other ranks
//            Take, the same: a pull of one rank's part
//   "tessera-shards"  sends requests and answers, receives into `whole`, ends
//                     the futures; sleeps where nothing can be moved
//   "tessera-watch"   looks now and then whether to give up (ShardWatch)
//
// Only "tessera-shards" ends pulls, so it alone writes to their memory.
//
// Tensors of a device go through host memory, on a stream of "tessera-shards",
// whose place among the callers' streams StreamPoints keep. That thread waits
// for the device where it reads a shard; the callers' threads never do.
#ifndef COMM_SERVE_TCP_SHARD_SERVER_H_
#define COMM_SERVE_TCP_SHARD_SERVER_H_

#include <poll.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/stream/stream_point.h"
#include "c10/core/Stream.h"
#include "comm/comm_thread.h"
#include "comm/group_options.h"
#include "comm/record/comm_log.h"
#include "comm/record/flight_recorder.h"
#include "comm/serve/shard_mesh.h"
#include "comm/serve/shard_streams.h"
#include "comm/serve/shard_watch.h"
#include "comm/shard_server.h"
#include "comm/watch/failure_domain.h"

namespace tessera {

class GroupCommunicator;

// The group that a server is of, as one rank has it.
struct ServedGroup {
  GroupOptions options;
  std::shared_ptr<FailureDomain> domain;
  // Where pulls are recorded and counted; borrowed from `owner`.
  FlightRecorder* records = nullptr;
  CommLog* costs = nullptr;
  std::shared_ptr<Communicator> owner;  // kept alive
};

// What GroupMakers::shard_server is in groups of several ranks: connects
// the ranks (comm/serve/shard_mesh.h), and makes their servers. COLLECTIVE,
// blocking. Returns the same error on all ranks.
absl::StatusOr<std::unique_ptr<ShardServer>> MakeTcpShardServer(
    GroupCommunicator* group, const CommTag& tag);

class TcpShardServer final : public ShardServer, private AskingEnd::Receiver {
 public:
  // Takes the descriptors. Returns ResourceExhausted if there are none left, or
  // no threads.
  static absl::StatusOr<std::unique_ptr<ShardServer>> Create(
      ServedGroup group, std::unique_ptr<ShardMesh> mesh);
  ~TcpShardServer() override;

  void Offer(int64_t key, at::Tensor shard) override;
  void SetVersion(int64_t version) override;
  CommFuture Pull(int64_t key, int64_t version, at::Tensor whole,
                  CommTag tag) override;
  void Post(int to, int64_t key, at::Tensor message) override;
  CommFuture Take(int from, int64_t key, at::Tensor message,
                  CommTag tag) override;
  void OrderAfterReads() override;
  CommFuture Retire() override;

 private:
  struct Offered {
    at::Tensor shard;
    StreamPoint written;
    bool is_posted = false;  // so it is freed once it was read
  };
  // One that is under way.
  struct PullState {
    ShardRequest request;
    at::Tensor whole;
    at::Tensor host;  // what is received into; `whole` itself if on the host
    StreamPoint allocated;              // of `whole`
    std::optional<c10::Stream> caller;  // and its stream
    CollectiveRecord record;
    std::vector<bool> missing;  // by rank
    int num_missing = 0;
    std::shared_ptr<CommFuture::State> future;
    // Where that rank's part begins in `host`.
    int64_t offset_of(int r) const {
      return request.is_posted() ? 0 : r * request.bytes;
    }
  };
  using PullPtr = std::unique_ptr<PullState>;
  // A rank's connections.
  struct Peer {
    Peer(int ask, int serve, int rank, AskingEnd::Receiver* receiver)
        : asking(ask, rank, receiver), serving(serve) {}
    AskingEnd asking;
    ServingEnd serving;
    int64_t num_early = 0;  // of early_
  };
  // What came too early.
  struct Early {
    int peer = 0;
    ShardRequest request;
  };

  TcpShardServer(ServedGroup group, ShardMesh* mesh, int wake_fd);
  absl::Status Start();  // its threads
  // One that misses the parts of the ranks `of`.
  absl::StatusOr<PullPtr> MakePull(const ShardRequest& request,
                                   const at::Tensor& whole,
                                   std::vector<bool> of,
                                   const CommTag& tag) const;
  CommFuture Begin(PullPtr pull);
  // Another take of that message is under way.
  bool IsTaken(const PullState& take) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Copies this rank's own part, which is in host memory.
  absl::Status CopyOwn(PullState& pull, const at::Tensor& host) const;
  void Wake() const;
  // What `request` asks for, of what is offered here; undefined: not yet.
  absl::StatusOr<Offered> Find(const ShardRequest& request);
  // What is posted to that rank, and is not any more; undefined: not yet.
  absl::StatusOr<Offered> TakePosted(int peer, const ShardRequest& request);

  // ---- on tessera-shards ----
  void Run();
  void FillPoll(std::vector<pollfd>* fds) const;
  void Turn(int peer, short asking, short serving);
  // Nothing more is sent to that rank.
  void CloseServing(int peer);
  // Frees what is posted to such ranks.
  void DropPosts();
  // What callers brought. False: stop.
  bool TakeNews();
  void Serve(int peer, const ShardRequest& request);
  // Returns the shard in host memory.
  absl::StatusOr<at::Tensor> ReadShard(const Offered& offered);
  char* PlaceFor(int peer, const ShardAnswer& answer) override;
  void Answered(int peer, int64_t ticket, const absl::Status& error) override;
  void CloseAsking(int peer);
  void StopAsking();
  bool AnyMayAsk() const;
  void EndRetirement();
  PullState* FindPull(int64_t ticket);
  void End(PullPtr pull, CommThread::End end);
  // Ends all pulls.
  void EndAll(const absl::Status& status);
  // And makes the group failed.
  void Fail(const absl::Status& status);

  // ---- on tessera-watch ----
  void Look();

  const ServedGroup group_;
  const int rank_;
  const int world_size_;
  const int wake_fd_;  // an eventfd

  // Used by the thread tessera-shards only.
  std::vector<std::unique_ptr<Peer>> peers_;  // by rank; null for the own
  std::vector<Early> early_;
  absl::Duration charged_;  // waits until then are counted

  ShardWatch watch_;  // of tessera-watch alone
  int64_t look_ = 0;  // of Watchdog::Add; 0: not there

  absl::Mutex mutex_;
  std::map<int64_t, Offered> offers_ ABSL_GUARDED_BY(mutex_);
  // By receiver, and key.
  std::vector<std::map<int64_t, Offered>> posts_ ABSL_GUARDED_BY(mutex_);
  StreamPoint read_ ABSL_GUARDED_BY(mutex_);  // the last of a shard
  int64_t version_ ABSL_GUARDED_BY(mutex_) = -1;
  std::map<int64_t, PullPtr> pulls_ ABSL_GUARDED_BY(mutex_);  // by ticket
  int64_t tickets_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<ShardRequest> asks_ ABSL_GUARDED_BY(mutex_);  // not yet sent
  // Offers, posts, or the version.
  bool changed_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::optional<absl::Duration>> closed_ ABSL_GUARDED_BY(mutex_);
  absl::Status verdict_ ABSL_GUARDED_BY(mutex_);
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  // The future of Retire, until that has ended.
  std::shared_ptr<CommFuture::State> retirement_ ABSL_GUARDED_BY(mutex_);
  bool retires_ ABSL_GUARDED_BY(mutex_) = false;  // not yet taken note of
  bool retired_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace tessera
#endif  // COMM_SERVE_TCP_SHARD_SERVER_H_
