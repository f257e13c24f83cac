// Ranks of a group that serve shards, all in this one process: connected by
// socket pairs, with Announcements of their own each, over one store.
#ifndef COMM_SERVE_SHARD_SERVER_TESTING_H_
#define COMM_SERVE_SHARD_SERVER_TESTING_H_

#include <sys/socket.h>

#include <memory>
#include <utility>
#include <vector>

#include "ATen/Parallel.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/status.h"
#include "comm/record/hang_dump.h"
#include "comm/serve/tcp_shard_server.h"
#include "comm/watch/announcements.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"

namespace tessera {

// One rank of the group.
struct Rank {
  Rank(int rank, int world_size) : costs({rank, world_size}) {}
  absl::Status failure() const { return domain->failure()->Get(); }

  std::shared_ptr<FailureDomain> domain;
  FlightRecorder records;
  CommLog costs;
  std::unique_ptr<ShardServer> server;
};

class Ranks {
 public:
  explicit Ranks(int world_size, absl::Duration timeout = absl::Seconds(20),
                 absl::Duration grace = absl::Seconds(5))
      : world_size_(world_size) {
    SetHangDumpFolder("off");
    // ThreadSanitizer does not know the locks in these.
    at::set_num_threads(1);
    absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
    const auto store = c10::make_intrusive<c10d::HashStore>();
    for (int r = 0; r < world_size; ++r) {
      meshes_.push_back(std::make_unique<ShardMesh>(world_size));
    }
    for (int a = 0; a < world_size; ++a) {
      for (int b = 0; b < world_size; ++b) {
        if (a != b) Connect(&meshes_[a]->ask[b], &meshes_[b]->serve[a]);
      }
    }
    for (int r = 0; r < world_size; ++r) {
      ranks_.push_back(std::make_unique<Rank>(r, world_size));
      GroupOptions options;
      options.rank = r;
      options.world_size = world_size;
      options.collective_timeout = timeout;
      options.announce_grace = grace;
      options_.push_back(options);
      ranks_[r]->domain = std::make_shared<FailureDomain>(
          options,
          Announcements::Create(store, r, world_size, /*same_host=*/true)
              .value());
    }
  }
  ~Ranks() {
    // None gives the others' last pulls up.
    for (auto& rank : ranks_) rank->server = nullptr;
  }

  absl::Status TryStart(int r) {
    ServedGroup group;
    group.options = options_[r];
    group.domain = ranks_[r]->domain;
    group.records = &ranks_[r]->records;
    group.costs = &ranks_[r]->costs;
    TESSERA_ASSIGN_OR_RETURN(
        ranks_[r]->server,
        TcpShardServer::Create(std::move(group), std::move(meshes_[r])));
    return absl::OkStatus();
  }
  void Start(int r) { TESSERA_CHECK_OK(TryStart(r)); }
  void StartAll() {
    for (int r = 0; r < world_size_; ++r) Start(r);
  }

  int world_size() const { return world_size_; }
  Rank& operator[](int r) { return *ranks_[r]; }
  ShardMesh& mesh(int r) { return *meshes_[r]; }

 private:
  static void Connect(int* a, int* b) {
    int fds[2];
    TESSERA_CHECK(socketpair(AF_UNIX,
                             SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0,
                             fds) == 0);
    *a = fds[0];
    *b = fds[1];
  }

  const int world_size_;
  std::vector<GroupOptions> options_;
  std::vector<std::unique_ptr<ShardMesh>> meshes_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

}  // namespace tessera
#endif  // COMM_SERVE_SHARD_SERVER_TESTING_H_
