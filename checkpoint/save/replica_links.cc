// A connection carries, for each save (integers are little-endian):
//
//   sender   <id of the save, 8 bytes> <bytes of the file, 8> <the file>
//   keeper   'k', once it is on the disk
#include "checkpoint/save/replica_links.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "checkpoint/format/manifest.h"
#include "comm/connect/sockets.h"
#include "comm/serve/shard_mesh.h"

namespace tessera {
namespace {

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

absl::StatusOr<std::unique_ptr<ReplicaLinks>> ReplicaLinks::Connect(
    const std::vector<int>& keepers, Communicator* comm) {
  ShardMeshOptions options;
  options.timeout = absl::Seconds(30);
  options.purpose = "replicas";
  options.only_peers = keepers;
  options.what =
      ", which is to keep replicas of checkpoints (checkpoint.replicas),";
  options.where = "SaveCheckpoint";
  TESSERA_ASSIGN_OR_RETURN(
      std::unique_ptr<ShardMesh> mesh,
      ConnectShardMesh(*comm, options, {"replicas of checkpoints"}));
  for (const std::vector<int>* fds : {&mesh->ask, &mesh->serve}) {
    for (int fd : *fds) {
      if (fd >= 0) KeepAlive(fd);
    }
  }
  return std::unique_ptr<ReplicaLinks>(
      new ReplicaLinks(keepers, comm->rank(), std::move(mesh)));
}

absl::Status ReplicaLinks::Exchange(const Folder& folder, uint64_t id,
                                    const std::function<bool()>& given_up) {
  const int keeper = keepers_[static_cast<size_t>(rank_)];
  Sending sending(mesh_->ask[static_cast<size_t>(keeper)], keeper);
  TESSERA_RETURN_IF_ERROR(sending.Open(folder, id, rank_));
  std::vector<Keeping> keeping;
  for (int r = 0; r < static_cast<int>(mesh_->serve.size()); ++r) {
    const int fd = mesh_->serve[static_cast<size_t>(r)];
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
