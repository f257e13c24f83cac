// Why an answer: a connection is made as soon as the other host's kernel has
// taken it, also if the port meanwhile belongs to another program. Only the
// answer tells that a rank of this job is there, so that who connects tries the
// next address otherwise.
#include "comm/connect/handshake.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "base/system/close_on_fork.h"
#include "comm/connect/job_secret.h"
#include "comm/connect/keyed_hash.h"
#include "comm/connect/peer_user.h"
#include "comm/connect/sockets.h"

namespace tessera {
namespace {

constexpr absl::string_view kMagic = "tessera2";
constexpr size_t kNonceBytes = 16;
constexpr size_t kHelloBytes = kMagic.size() + kNonceBytes + sizeof(int32_t);
constexpr char kOk = 'k';  // both for the answer and to say that it has come

// An address that did not answer in time, or turned this rank away in a crowd
// of strangers, is tried again for so long.
constexpr absl::Duration kPatience = absl::Seconds(5);
constexpr absl::Duration kPause = absl::Milliseconds(50);

std::string Proof(absl::string_view key, absl::string_view who,
                  absl::string_view theirs, absl::string_view ours,
                  int32_t rank) {
  return KeyedHash(key, {who, theirs, ours, absl::StrCat(rank)});
}

absl::Status SendAll(int fd, absl::string_view bytes) {
  if (send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
      static_cast<ssize_t>(bytes.size())) {
    return absl::OkStatus();
  }
  return absl::UnavailableError("the connection was closed");
}

absl::StatusOr<std::string> Receive(int fd, size_t count, Deadline deadline) {
  std::string bytes(count, 0);
  size_t have = 0;
  while (have < count) {
    const int64_t left_ms = absl::ToInt64Milliseconds(deadline.Left());
    if (left_ms <= 0 ||
        !WaitForSocket(fd, POLLIN,
                       static_cast<int>(std::min<int64_t>(left_ms, 1 << 30)))) {
      return absl::DeadlineExceededError("no answer");
    }
    const ssize_t got = recv(fd, &bytes[have], count - have, MSG_DONTWAIT);
    if (got > 0) {
      have += got;
    } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
      return absl::UnavailableError("the connection was closed");
    }
  }
  return bytes;
}

absl::StatusOr<int> ConnectOnce(int rank, const std::string& address,
                                const std::string& port,
                                absl::string_view key) {
  const int fd = ConnectTo(address, port);
  if (fd < 0 && errno == ETIMEDOUT) return absl::UnavailableError("no answer");
  if (fd < 0) return absl::NotFoundError("nobody listens there");
  KeepAlive(fd);
  const absl::Status status =
      Introduce(fd, key, rank, Deadline::After(kPatience));
  if (status.ok()) return fd;
  CloseDescriptor(fd);
  return status;
}

}  // namespace

// "<token> <port> <network> <address>...".
Listener Listen(bool loopback, int backlog, const std::string& network) {
  Listener listener;
  uint16_t port = 0;
  listener.fd = OpenListener(loopback, backlog, &port);
  if (listener.fd >= 0) {
    listener.token = RandomToken();
    listener.where =
        absl::StrCat(listener.token, " ", port, " ", network, " ",
                     loopback ? "" : absl::StrJoin(Addresses(), " "));
  }
  return listener;
}

Endpoint ParseEndpoint(const std::string& where, const std::string& network) {
  const std::vector<std::string> parts =
      absl::StrSplit(where, ' ', absl::SkipEmpty());
  Endpoint endpoint;
  if (parts.size() < 3) return endpoint;
  endpoint.token = parts[0];
  endpoint.port = parts[1];
  endpoint.addresses.assign(parts.begin() + 3, parts.end());
  if (parts[2] == network) {
    endpoint.addresses.insert(endpoint.addresses.begin(), "127.0.0.1");
  }
  return endpoint;
}

int ConnectAs(int rank, const Endpoint& endpoint, absl::string_view purpose) {
  const std::string key = JobKey(purpose, endpoint.token);
  const Deadline deadline = Deadline::After(kPatience);
  std::vector<std::string> left = endpoint.addresses;
  // In turns: some addresses of a host may never answer.
  while (true) {
    std::vector<std::string> again;
    for (const std::string& address : left) {
      const absl::StatusOr<int> fd =
          ConnectOnce(rank, address, endpoint.port, key);
      if (fd.ok()) return *fd;
      if (absl::IsUnavailable(fd.status())) again.push_back(address);
    }
    if (again.empty() || deadline.HasPassed()) return -1;
    left = std::move(again);
    absl::SleepFor(kPause);
  }
}

absl::Status Introduce(int fd, absl::string_view key, int rank,
                       Deadline deadline) {
  const int32_t number = rank;
  const std::string ours = RandomBytes(kNonceBytes);
  TESSERA_RETURN_IF_ERROR(SendAll(
      fd, absl::StrCat(kMagic, ours,
                       absl::string_view(reinterpret_cast<const char*>(&number),
                                         sizeof(number)))));
  TESSERA_ASSIGN_OR_RETURN(const std::string answer,
                           Receive(fd, kNonceBytes + kHashBytes, deadline));
  const absl::string_view theirs =
      absl::string_view(answer).substr(0, kNonceBytes);
  if (!SameHash(answer.substr(kNonceBytes),
                Proof(key, "listens", ours, theirs, number))) {
    return absl::PermissionDeniedError(
        "the process there is not of this job, or was given another secret");
  }
  // Not before the answer: until then nobody has taken the connection.
  if (!HasJobSecret() && OfAnotherUser(fd)) {
    return absl::PermissionDeniedError("the process there is another user's");
  }
  TESSERA_RETURN_IF_ERROR(
      SendAll(fd, Proof(key, "connects", ours, theirs, number)));
  TESSERA_ASSIGN_OR_RETURN(const std::string ok, Receive(fd, 1, deadline));
  if (ok[0] != kOk) {
    return absl::PermissionDeniedError("the process there is not of this job");
  }
  return SendAll(fd, absl::string_view(&kOk, 1));
}

size_t Greeting::wanted() const {
  switch (stage_) {
    case kHello:
      return kHelloBytes - in_.size();
    case kAnswered:
      return kHashBytes - in_.size();
    case kProven:
      return 1 - in_.size();
    case kThere:
      break;
  }
  return 0;
}

bool Greeting::Take(absl::string_view bytes, std::string* answer) {
  if (bytes.empty()) return true;
  if (bytes.size() > wanted()) return false;
  in_.append(bytes.data(), bytes.size());
  if (wanted() > 0) return true;
  const bool right = Understand(answer);
  in_.clear();
  return right;
}

// A whole message of its stage.
bool Greeting::Understand(std::string* answer) {
  switch (stage_) {
    case kHello:
      theirs_ = in_.substr(kMagic.size(), kNonceBytes);
      memcpy(&rank_, in_.data() + kMagic.size() + kNonceBytes, sizeof(rank_));
      if (absl::string_view(in_).substr(0, kMagic.size()) != kMagic ||
          rank_ < 0 || rank_ >= world_size_ || rank_ == own_) {
        return false;
      }
      ours_ = RandomBytes(kNonceBytes);
      absl::StrAppend(answer, ours_,
                      Proof(key_, "listens", theirs_, ours_, rank_));
      stage_ = kAnswered;
      return true;
    case kAnswered:
      if (!SameHash(in_, Proof(key_, "connects", theirs_, ours_, rank_))) {
        return false;
      }
      answer->push_back(kOk);
      stage_ = kProven;
      return true;
    case kProven:
      stage_ = kThere;
      return in_[0] == kOk;
    case kThere:
      break;
  }
  return false;
}

}  // namespace tessera
