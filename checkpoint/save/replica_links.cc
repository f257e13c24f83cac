// A connection carries, for each save (integers are little-endian):
//
//   sender   <id of the save, 8 bytes> <bytes of the file, 8> <the file>
//   keeper   'k', once it is on the disk
#include "checkpoint/save/replica_links.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "base/system/close_on_fork.h"
#include "base/thread/deadline.h"
#include "base/thread/start_thread.h"
#include "checkpoint/format/manifest.h"
#include "comm/connect/handshake.h"
#include "comm/connect/job_secret.h"
#include "comm/connect/reception.h"
#include "comm/connect/sockets.h"
#include "comm/rendezvous/local_address.h"

namespace tessera {
namespace {

constexpr char kPurpose[] = "replicas";
constexpr absl::Duration kConnectTimeout = absl::Seconds(30);
constexpr int kTickMs = 50;
constexpr int64_t kPartBytes = 1 << 20;
constexpr int kPartsAtOnce = 16;  // in one direction, before the other's turn
constexpr int64_t kHeaderBytes = 16;
constexpr char kKept = 'k';

absl::Status Ended(int rank) {
  return absl::UnavailableError(absl::StrCat(
      "rank ", rank,
      " has ended, or cannot be reached, while replicas of a checkpoint's "
      "files are exchanged"));
}

bool MustWait(ssize_t result) {
  return result < 0 &&
         (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
}

// Sends this rank's own file.
class Sending {
 public:
  Sending(int fd, int keeper) : fd_(fd), keeper_(keeper) {}

  absl::Status Open(const Folder& folder, uint64_t id, int rank) {
    TESSERA_ASSIGN_OR_RETURN(file_, folder.OpenFile(DataFileName(id, rank)));
    const int64_t bytes = file_.bytes();
    part_.resize(kHeaderBytes);
    std::memcpy(part_.data(), &id, sizeof(id));
    std::memcpy(part_.data() + sizeof(id), &bytes, sizeof(bytes));
    return absl::OkStatus();
  }
  bool done() const { return kept_; }
  pollfd wanted() const {
    return {fd_, static_cast<short>(sent_all() ? POLLIN : POLLOUT), 0};
  }

  absl::Status Go() {
    for (int parts = 0; !sent_all();) {
      if (at_ == part_.size()) {
        if (parts++ == kPartsAtOnce) return absl::OkStatus();
        TESSERA_RETURN_IF_ERROR(Next());
      }
      const ssize_t n = send(fd_, part_.data() + at_, part_.size() - at_,
                             MSG_NOSIGNAL | MSG_DONTWAIT);
      if (MustWait(n)) return absl::OkStatus();
      if (n <= 0) return Ended(keeper_);
      at_ += static_cast<size_t>(n);
    }
    char answer = 0;
    const ssize_t n = recv(fd_, &answer, 1, MSG_DONTWAIT);
    if (MustWait(n)) return absl::OkStatus();
    if (n <= 0 || answer != kKept) return Ended(keeper_);
    kept_ = true;
    return absl::OkStatus();
  }

 private:
  bool sent_all() const {
    return read_ == file_.bytes() && at_ == part_.size();
  }
  absl::Status Next() {
    const int64_t n = std::min(kPartBytes, file_.bytes() - read_);
    part_.resize(static_cast<size_t>(n));
    TESSERA_RETURN_IF_ERROR(file_.ReadAt(read_, part_.data(), n));
    read_ += n;
    at_ = 0;
    return absl::OkStatus();
  }

  const int fd_, keeper_;
  File file_;
  int64_t read_ = 0;
  std::string part_;  // what is sent next
  size_t at_ = 0;
  bool kept_ = false;
};

// Receives and keeps another rank's file.
class Keeping {
 public:
  Keeping(int fd, int rank, const Folder* folder, uint64_t id)
      : fd_(fd), rank_(rank), folder_(folder), id_(id) {}

  bool done() const { return done_; }
  pollfd wanted() const { return {fd_, POLLIN, 0}; }

  absl::Status Go() {
    for (int parts = 0; !done_ && parts < kPartsAtOnce; ++parts) {
      const int64_t left =
          bytes_ < 0 ? kHeaderBytes - static_cast<int64_t>(header_.size())
                     : std::min(kPartBytes, bytes_ - written_);
      part_.resize(static_cast<size_t>(left));
      if (left > 0) {
        const ssize_t n = recv(fd_, part_.data(), part_.size(), MSG_DONTWAIT);
        if (MustWait(n)) return absl::OkStatus();
        if (n <= 0) return Ended(rank_);
        part_.resize(static_cast<size_t>(n));
      }
      TESSERA_RETURN_IF_ERROR(Take());
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Take() {
    if (bytes_ < 0) {
      header_ += part_;
      return static_cast<int64_t>(header_.size()) == kHeaderBytes
                 ? Begin()
                 : absl::OkStatus();
    }
    TESSERA_RETURN_IF_ERROR(file_.WriteAt(written_, part_));
    written_ += static_cast<int64_t>(part_.size());
    if (written_ < bytes_) return absl::OkStatus();
    TESSERA_RETURN_IF_ERROR(file_.Sync());
    if (send(fd_, &kKept, 1, MSG_NOSIGNAL) != 1) return Ended(rank_);
    done_ = true;
    return absl::OkStatus();
  }

  absl::Status Begin() {
    uint64_t id = 0;
    std::memcpy(&id, header_.data(), sizeof(id));
    std::memcpy(&bytes_, header_.data() + sizeof(id), sizeof(bytes_));
    if (id != id_ || bytes_ < 0) {
      return absl::InternalError(absl::StrCat(
          "rank ", rank_, " sends a file of another save than this one"));
    }
    absl::StatusOr<File> file = folder_->CreateFile(DataFileName(id_, rank_));
    TESSERA_RETURN_IF_ERROR(file.status());
    file_ = *std::move(file);
    return absl::OkStatus();
  }

  const int fd_, rank_;
  const Folder* const folder_;
  const uint64_t id_;
  std::string header_;
  int64_t bytes_ = -1;  // of the file; -1: its header has not come
  int64_t written_ = 0;
  std::string part_;
  File file_;
  bool done_ = false;
};

}  // namespace

std::vector<int> KeepersOf(const std::vector<int>& leaders) {
  std::vector<int> hosts = leaders;  // by rank, the leader of its host
  std::sort(hosts.begin(), hosts.end());
  hosts.erase(std::unique(hosts.begin(), hosts.end()), hosts.end());
  if (hosts.size() < 2) return {};
  std::vector<int> keepers(leaders.size());
  for (size_t h = 0; h < hosts.size(); ++h) {
    std::vector<int> ranks, next;
    for (int r = 0; r < static_cast<int>(leaders.size()); ++r) {
      const int leader = leaders[static_cast<size_t>(r)];
      if (leader == hosts[h]) ranks.push_back(r);
      if (leader == hosts[(h + 1) % hosts.size()]) next.push_back(r);
    }
    for (size_t i = 0; i < ranks.size(); ++i) {
      keepers[static_cast<size_t>(ranks[i])] = next[i % next.size()];
    }
  }
  return keepers;
}

ReplicaLinks::ReplicaLinks(std::vector<int> keepers, int rank)
    : keepers_(std::move(keepers)), rank_(rank), in_(keepers_.size(), -1) {}

ReplicaLinks::~ReplicaLinks() {
  CloseOnce(&out_);
  for (int& fd : in_) CloseOnce(&fd);
}

// All ranks connect at once, and accept on a thread meanwhile: a connection is
// not made before the other side has answered.
absl::Status ReplicaLinks::ConnectOwn(const std::vector<std::string>& places,
                                      const std::string& network, int listen_fd,
                                      const std::string& token) {
  const auto expected = std::count(keepers_.begin(), keepers_.end(), rank_);
  std::atomic<bool> stop{false};
  std::atomic<int64_t> missing{expected};
  TESSERA_ASSIGN_OR_RETURN(
      std::thread letting_in, StartThread("tessera-accept", [&] {
        Reception::Options options;
        options.key = JobKey(kPurpose, token);
        options.own = rank_;
        options.world_size = options.at_once =
            static_cast<int>(keepers_.size());
        Reception reception(listen_fd, options);
        std::vector<pollfd> fds;
        while (!stop && missing > 0) {
          fds.clear();
          reception.AddTo(&fds);
          if (poll(fds.data(), fds.size(), kTickMs) < 0) continue;
          for (const Guest& guest : reception.Look(fds.data())) {
            int& fd = in_[static_cast<size_t>(guest.rank)];
            if (fd < 0) --missing;
            CloseOnce(&fd);
            fd = guest.fd;
          }
        }
      }));
  const int keeper = keepers_[static_cast<size_t>(rank_)];
  const Endpoint endpoint =
      ParseEndpoint(places[static_cast<size_t>(keeper)], network);
  const Deadline until = Deadline::After(kConnectTimeout);
  while (out_ < 0 && !until.HasPassed()) {
    out_ = ConnectAs(rank_, endpoint, kPurpose);
    if (out_ < 0) absl::SleepFor(absl::Milliseconds(20));
  }
  while (out_ >= 0 && missing > 0 && !until.HasPassed()) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  stop = true;
  letting_in.join();
  if (out_ >= 0 && missing == 0) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(
      out_ < 0 ? absl::StrCat("cannot connect to rank ", keeper)
               : std::string("some rank has not connected to this one"),
      ", which is to keep replicas of checkpoints (checkpoint.replicas), "
      "within ",
      absl::FormatDuration(kConnectTimeout)));
}

absl::StatusOr<std::unique_ptr<ReplicaLinks>> ReplicaLinks::Connect(
    const std::vector<int>& keepers, Communicator* comm) {
  auto links =
      std::unique_ptr<ReplicaLinks>(new ReplicaLinks(keepers, comm->rank()));
  const std::string network = NetworkId();
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<std::string> networks,
      comm->AllGatherStrings(network, CommTag{"replicas of checkpoints"}));
  const bool one = std::count(networks.begin(), networks.end(), network) ==
                   comm->world_size();
  Listener listener = Listen(one, comm->world_size(), network);
  const auto closer = absl::MakeCleanup([&] { CloseOnce(&listener.fd); });
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<std::string> places,
      comm->AllGatherStrings(listener.where,
                             CommTag{"replicas of checkpoints"}));
  absl::Status mine;
  for (size_t r = 0; r < places.size() && mine.ok(); ++r) {
    if (!places[r].empty()) continue;
    mine = absl::UnavailableError(
        absl::StrCat("replicas of checkpoints: rank ", r, " cannot listen"));
  }
  if (mine.ok()) {
    mine = links->ConnectOwn(places, network, listener.fd, listener.token);
  }
  TESSERA_RETURN_IF_ERROR(comm->AgreeOk(mine, "SaveCheckpoint"));
  KeepAlive(links->out_);
  for (int fd : links->in_) {
    if (fd >= 0) KeepAlive(fd);
  }
  return links;
}

absl::Status ReplicaLinks::Exchange(const Folder& folder, uint64_t id,
                                    const std::function<bool()>& given_up) {
  Sending sending(out_, keepers_[static_cast<size_t>(rank_)]);
  TESSERA_RETURN_IF_ERROR(sending.Open(folder, id, rank_));
  std::vector<Keeping> keeping;
  for (int r = 0; r < static_cast<int>(in_.size()); ++r) {
    const int fd = in_[static_cast<size_t>(r)];
    if (fd >= 0) keeping.emplace_back(fd, r, &folder, id);
  }
  const auto all_done = [&] {
    return sending.done() &&
           std::all_of(keeping.begin(), keeping.end(),
                       [](const Keeping& one) { return one.done(); });
  };
  std::vector<pollfd> fds;
  while (!all_done()) {
    if (given_up()) return absl::CancelledError("the save was given up");
    fds.clear();
    if (!sending.done()) fds.push_back(sending.wanted());
    for (const Keeping& one : keeping) {
      if (!one.done()) fds.push_back(one.wanted());
    }
    (void)poll(fds.data(), fds.size(), kTickMs);
    if (!sending.done()) TESSERA_RETURN_IF_ERROR(sending.Go());
    for (Keeping& one : keeping) {
      if (!one.done()) TESSERA_RETURN_IF_ERROR(one.Go());
    }
  }
  return folder.Sync();
}

}  // namespace tessera
