// Why each rank greets on a thread of its own while it connects: all connect at
// once, and a connection is not made before the other side has answered. One
// that connected first and listened later would wait for a rank that waits for
// it. Why the ranks agree at the end: one that went on with an incomplete mesh
// would ask for shards that nobody can send, and why it failed would be known
// on the failing rank alone.
#include "comm/serve/shard_mesh.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "base/thread/deadline.h"
#include "base/thread/start_thread.h"
#include "comm/connect/handshake.h"
#include "comm/connect/job_secret.h"
#include "comm/connect/reception.h"
#include "comm/connect/sockets.h"
#include "comm/rendezvous/local_address.h"

namespace tessera {
namespace {

constexpr int kTickMs = 50;
// How long a rank is waited for before the store is asked about it.
constexpr absl::Duration kPatience = absl::Milliseconds(300);

bool OutOfDescriptors(int error) { return error == EMFILE || error == ENFILE; }

// Takes the connections of other ranks, on a thread of its own: they wait to be
// let in.
class Acceptor {
 public:
  Acceptor(int listen_fd, const std::string& key, int rank, int expected,
           std::vector<int>* serve)
      : serve_(serve),
        reception_(listen_fd, OptionsFor(key, rank, serve->size())),
        missing_(expected) {}
  ~Acceptor() { Stop(); }

  absl::Status Start() {
    TESSERA_ASSIGN_OR_RETURN(thread_,
                             StartThread("tessera-accept", [this] { Run(); }));
    return absl::OkStatus();
  }

  bool complete() const { return missing_ == 0; }
  // It cannot go on: there are no descriptors.
  bool starved() const { return starved_; }
  // `serve` may be read then.
  void Stop() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }

 private:
  static Reception::Options OptionsFor(const std::string& key, int rank,
                                       size_t world_size) {
    Reception::Options options;
    options.key = key;
    options.own = rank;
    options.world_size = options.at_once = static_cast<int>(world_size);
    return options;
  }

  void Run() {
    std::vector<pollfd> fds;
    while (!stop_ && !starved_ && !complete()) {
      fds.clear();
      reception_.AddTo(&fds);
      if (poll(fds.data(), fds.size(), kTickMs) < 0) continue;
      for (const Guest& guest : reception_.Look(fds.data())) Register(guest);
      starved_ = reception_.starved();
    }
  }

  void Register(const Guest& guest) {
    int& connected = (*serve_)[guest.rank];
    const bool is_new = connected < 0;
    CloseOnce(&connected);  // it has come anew
    connected = guest.fd;
    if (is_new) --missing_;
  }

  std::vector<int>* const serve_;  // of `thread_` while it runs
  Reception reception_;
  std::atomic<int> missing_;
  std::atomic<bool> stop_{false}, starved_{false};
  std::thread thread_;
};

// Are there none left? (`fd` is any open one.)
bool NoDescriptors(int fd) {
  int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  const bool none = copy < 0 && OutOfDescriptors(errno);
  CloseOnce(&copy);
  return none;
}

// Waits until `done`, which is asked every few milliseconds.
absl::Status Await(const ShardMeshOptions& options, Deadline deadline,
                   const std::function<absl::StatusOr<bool>()>& done,
                   absl::string_view what) {
  Deadline ask = Deadline::After(kPatience);
  absl::Duration nap = absl::Microseconds(100);
  while (true) {
    TESSERA_ASSIGN_OR_RETURN(const bool is_done, done());
    if (is_done) return absl::OkStatus();
    if (deadline.HasPassed()) {
      return absl::UnavailableError(absl::StrCat(
          what, " within ", absl::FormatDuration(options.timeout)));
    }
    if (options.trouble && ask.HasPassed()) {
      TESSERA_RETURN_IF_ERROR(options.trouble());
      ask = Deadline::After(kPatience);
    }
    absl::SleepFor(nap);
    nap = std::min(2 * nap, absl::Milliseconds(20));
  }
}

absl::Status ConnectAll(const std::vector<Endpoint>& endpoints, int listen_fd,
                        int rank, const ShardMeshOptions& options,
                        ShardMesh* mesh) {
  const Deadline deadline = Deadline::After(options.timeout);
  const absl::Status starved =
      absl::ResourceExhaustedError("no descriptors are left");
  const int world_size = static_cast<int>(endpoints.size());
  const std::vector<int>& only = options.only_peers;
  const auto expected = only.empty()
                            ? world_size - 1
                            : std::count(only.begin(), only.end(), rank);
  Acceptor acceptor(listen_fd, JobKey(options.purpose, endpoints[rank].token),
                    rank, static_cast<int>(expected), &mesh->serve);
  TESSERA_RETURN_IF_ERROR(acceptor.Start());
  for (int i = 1; i < world_size; ++i) {
    const int peer = (rank + i) % world_size;
    if (!only.empty() && only[rank] != peer) continue;
    const auto connect = [&]() -> absl::StatusOr<bool> {
      mesh->ask[peer] = ConnectAs(rank, endpoints[peer], options.purpose);
      if (mesh->ask[peer] >= 0) return true;
      if (acceptor.starved() || NoDescriptors(listen_fd)) return starved;
      return false;
    };
    TESSERA_RETURN_IF_ERROR(Await(
        options, deadline, connect,
        absl::StrCat(
            "cannot connect to rank ", peer,
            options.what.empty()
                ? absl::StrCat(" at any of ",
                               absl::StrJoin(endpoints[peer].addresses, ", "))
                : options.what)));
  }
  const auto accept = [&]() -> absl::StatusOr<bool> {
    if (acceptor.starved()) return starved;
    return acceptor.complete();
  };
  return Await(
      options, deadline, accept,
      absl::StrCat("some rank has not connected to this one", options.what));
}

}  // namespace

ShardMesh::~ShardMesh() {
  for (int& fd : ask) CloseOnce(&fd);
  for (int& fd : serve) CloseOnce(&fd);
}

absl::StatusOr<std::unique_ptr<ShardMesh>> ConnectShardMesh(
    Communicator& group, const ShardMeshOptions& options, const CommTag& tag) {
  const int world_size = group.world_size(), rank = group.rank();
  const std::string network = NetworkId();
  TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> networks,
                           group.AllGatherStrings(network, tag));
  const bool same_host =
      std::count(networks.begin(), networks.end(), network) == world_size;
  Listener listener = Listen(same_host, world_size, network);
  const absl::StatusOr<std::vector<std::string>> all =
      group.AllGatherStrings(listener.where, tag);
  auto mesh = std::make_unique<ShardMesh>(world_size);
  absl::Status mine = all.status();
  if (mine.ok()) {
    std::vector<Endpoint> endpoints;
    for (int r = 0; r < world_size; ++r) {
      endpoints.push_back(ParseEndpoint((*all)[r], network));
      if (endpoints[r].token.empty() && mine.ok()) {
        mine = absl::UnavailableError(
            absl::StrCat(tag.what, ": rank ", r, " cannot listen"));
      }
    }
    if (mine.ok()) {
      mine = ConnectAll(endpoints, listener.fd, rank, options, mesh.get());
      // For those that wait to be connected with this rank.
      CloseOnce(&listener.fd);
      if (!mine.ok()) group.Announce(mine);
      const absl::Status agreed = group.AgreeOk(
          mine, options.where.empty() ? tag.what : options.where, tag.site);
      if (!mine.ok()) group.ClearAnnouncement();
      mine = agreed;
    }
  }
  CloseOnce(&listener.fd);
  if (!mine.ok()) return mine;
  return mesh;
}

}  // namespace tessera
