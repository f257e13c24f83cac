// Why an answer that did not come in time closes the connection: it could still
// come, and be taken for the next one's.
#include "comm/rendezvous/store_client.h"

#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "base/system/close_on_fork.h"
#include "base/system/system_limits.h"
#include "comm/connect/handshake.h"
#include "comm/connect/sockets.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace tessera {
namespace {

constexpr absl::Duration kPause = absl::Milliseconds(10);
constexpr absl::Duration kMaxPause = absl::Milliseconds(200);
// A handshake: of a server that is stopped meanwhile.
constexpr absl::Duration kHandshake = absl::Seconds(5);

// Numeric addresses, in the order in which the name service gives them.
std::vector<std::string> Resolve(const std::string& host) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  std::vector<std::string> addresses;
  if (getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0) return addresses;
  for (const addrinfo* it = found; it != nullptr; it = it->ai_next) {
    char text[NI_MAXHOST] = {};
    if (getnameinfo(it->ai_addr, it->ai_addrlen, text, sizeof(text), nullptr, 0,
                    NI_NUMERICHOST) == 0) {
      addresses.emplace_back(text);
    }
  }
  freeaddrinfo(found);
  return addresses;
}

// Returns ConnectTo's error for `error`, an errno.
absl::Status NoConnection(const std::string& host, int error) {
  const std::string limit = DescriptorLimit(error);
  if (!limit.empty()) {
    const std::string text = absl::StrCat(
        "no descriptor for a connection: ", std::strerror(error), limit);
    // The host's others may give some back; this process does not.
    return error == ENFILE ? absl::UnavailableError(text)
                           : absl::ResourceExhaustedError(text);
  }
  if (error != ECONNREFUSED && absl::StartsWith(host, "127.")) {
    const std::string text = NoLoopback(std::strerror(error));
    // Nobody brings it up while a job starts.
    return error == ENETUNREACH || error == ENETDOWN
               ? absl::FailedPreconditionError(text)
               : absl::UnavailableError(text);
  }
  return absl::UnavailableError("nobody listens there");
}

// One try of each address. Returns NotFound where the name is not known,
// Unavailable where nobody listens, Aborted where this rank was turned away, as
// happens among too many strangers; ResourceExhausted where there are no
// descriptors; FailedPrecondition where loopback is down; PermissionDenied only
// if all addresses are another job's.
// `address->host` is the numeric one that it is connected with then.
absl::StatusOr<int> DialOnce(StoreClientOptions* address, Deadline deadline) {
  absl::Status status =
      absl::NotFoundError(absl::StrCat("'", address->host, "' is unknown"));
  for (const std::string& host : Resolve(address->host)) {
    const int fd = ConnectTo(host, absl::StrCat(address->port));
    const int error = errno;
    absl::Status here;
    if (fd < 0) {
      here = NoConnection(host, error);
    } else {
      KeepAlive(fd);
      here = Introduce(fd, address->key, address->rank,
                       std::min(deadline, Deadline::After(kHandshake)));
      if (here.ok()) {
        address->host = host;
        return fd;
      }
      CloseDescriptor(fd);
      if (absl::IsUnavailable(here)) here = absl::AbortedError(here.message());
    }
    if (absl::IsNotFound(status) || absl::IsPermissionDenied(status)) {
      status = here;
    }
  }
  return status;
}

// No later try ends otherwise.
bool IsFinal(const absl::Status& status) {
  return absl::IsPermissionDenied(status) ||
         absl::IsResourceExhausted(status) ||
         absl::IsFailedPrecondition(status);
}

// Tries again as long as `again` says of an error, until the deadline.
absl::StatusOr<int> Dial(StoreClientOptions* address, Deadline deadline,
                         bool (*again)(const absl::Status&)) {
  absl::Duration pause = kPause;
  while (true) {
    absl::StatusOr<int> fd = DialOnce(address, deadline);
    if (fd.ok() || !again(fd.status()) || deadline.Left() <= pause) {
      return fd;
    }
    absl::SleepFor(pause);
    pause = std::min(2 * pause, kMaxPause);
  }
}

using Bytes = std::vector<uint8_t>;

std::string Text(const Bytes& bytes) {
  return std::string(bytes.begin(), bytes.end());
}

Bytes AsBytes(const std::string& text) {
  return Bytes(text.begin(), text.end());
}

StoreMessage Request(const std::string& op, std::vector<std::string> keys) {
  keys.insert(keys.begin(), op);
  return keys;
}

class StoreClient : public c10d::Store {
 public:
  explicit StoreClient(StoreClientOptions address, int fd,
                       std::chrono::milliseconds timeout)
      : Store(timeout), address_(std::move(address)), fd_(fd) {}
  ~StoreClient() override {
    absl::MutexLock lock(&mutex_);
    Close();
  }

  using Store::compareSet;
  using Store::set;

  // Connected by its first call. Waits for no call of this one.
  c10::intrusive_ptr<Store> clone() override {
    return c10::make_intrusive<StoreClient>(address_, -1, timeout_);
  }
  void set(const std::string& key, const Bytes& value) override {
    Ask({"set", key, Text(value)}, 0);
  }
  Bytes compareSet(const std::string& key, const Bytes& expected,
                   const Bytes& value) override {
    return AsBytes(Ask({"swap", key, Text(expected), Text(value)}, 1)[0]);
  }
  Bytes get(const std::string& key) override {
    return AsBytes(Ask({"get", key}, 1)[0]);
  }
  int64_t add(const std::string& key, int64_t value) override {
    return Number(Ask({"add", key, absl::StrCat(value)}, 1)[0]);
  }
  bool deleteKey(const std::string& key) override {
    return Number(Ask({"delete", key}, 1)[0]) != 0;
  }
  bool check(const std::vector<std::string>& keys) override {
    return Number(Ask(Request("check", keys), 1)[0]) != 0;
  }
  int64_t getNumKeys() override { return Number(Ask({"count"}, 1)[0]); }
  void wait(const std::vector<std::string>& keys) override {
    wait(keys, timeout_);
  }
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    Ask(Request("wait", keys), 0, timeout);
  }
  void append(const std::string& key, const Bytes& value) override {
    Ask({"append", key, Text(value)}, 0);
  }
  std::vector<Bytes> multiGet(const std::vector<std::string>& keys) override {
    std::vector<Bytes> values;
    for (const std::string& value : Ask(Request("get", keys), keys.size())) {
      values.push_back(AsBytes(value));
    }
    return values;
  }
  void multiSet(const std::vector<std::string>& keys,
                const std::vector<Bytes>& values) override {
    TORCH_CHECK(keys.size() == values.size(),
                "multiSet: as many values as keys");
    for (size_t i = 0; i < keys.size(); ++i) set(keys[i], values[i]);
  }
  bool hasExtendedApi() const override { return true; }

 private:
  static int64_t Number(const std::string& text) {
    int64_t number = 0;
    if (!absl::SimpleAtoi(text, &number)) {
      C10_THROW_ERROR(DistStoreError, "the store's answer is not a number");
    }
    return number;
  }

  StoreMessage Ask(const StoreMessage& request, size_t results) {
    return Ask(request, results, timeout_);
  }

  // The answer's results. Throws if there is none.
  StoreMessage Ask(const StoreMessage& request, size_t results,
                   std::chrono::milliseconds timeout) {
    absl::MutexLock lock(&mutex_);
    StoreMessage answer;
    absl::Status status =
        Exchange(request, Deadline::After(absl::FromChrono(timeout)), &answer);
    if (status.ok() && answer[0] != "ok") {
      status = absl::InternalError(answer.size() > 1 ? answer[1] : "an error");
    }
    if (status.ok() && answer.size() != results + 1) {
      status = absl::InternalError("an answer to something else");
    }
    if (!status.ok()) {
      Close();
      C10_THROW_ERROR(DistStoreError, std::string(status.message()));
    }
    answer.erase(answer.begin());
    return answer;
  }

  absl::Status Exchange(const StoreMessage& request, Deadline deadline,
                        StoreMessage* answer)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (fd_ < 0) {
      StoreClientOptions address = address_;
      TESSERA_ASSIGN_OR_RETURN(fd_, Dial(&address, deadline, absl::IsAborted));
    }
    TESSERA_RETURN_IF_ERROR(Send(EncodeFrame(request), deadline));
    std::string in;
    while (true) {
      switch (TakeFrame(&in, answer)) {
        case Decoded::kMessage:
          return absl::OkStatus();
        case Decoded::kNonsense:
          return absl::InternalError("the store's answer makes no sense");
        case Decoded::kIncomplete:
          TESSERA_RETURN_IF_ERROR(Receive(&in, deadline));
      }
    }
  }

  absl::Status Await(short events, Deadline deadline)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const int64_t left_ms = absl::ToInt64Milliseconds(deadline.Left());
    if (left_ms > 0 &&
        WaitForSocket(fd_, events,
                      static_cast<int>(std::min<int64_t>(left_ms, 1 << 30)))) {
      return absl::OkStatus();
    }
    return absl::DeadlineExceededError("the store has not answered in time");
  }

  absl::Status Send(absl::string_view bytes, Deadline deadline)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    while (!bytes.empty()) {
      const ssize_t sent = send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent >= 0) {
        bytes.remove_prefix(sent);
      } else if (errno == EAGAIN) {
        TESSERA_RETURN_IF_ERROR(Await(POLLOUT, deadline));
      } else if (errno != EINTR) {
        return absl::UnavailableError("the connection was closed");
      }
    }
    return absl::OkStatus();
  }

  absl::Status Receive(std::string* in, Deadline deadline)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    TESSERA_RETURN_IF_ERROR(Await(POLLIN, deadline));
    char buffer[16 << 10];
    const ssize_t got = recv(fd_, buffer, sizeof(buffer), MSG_DONTWAIT);
    if (got > 0) {
      in->append(buffer, got);
    } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
      return absl::UnavailableError("the connection was closed");
    }
    return absl::OkStatus();
  }

  void Close() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (fd_ >= 0) CloseDescriptor(fd_);
    fd_ = -1;
  }

  const StoreClientOptions address_;  // its host is numeric
  absl::Mutex mutex_;
  int fd_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

absl::StatusOr<c10::intrusive_ptr<c10d::Store>> ConnectStore(
    const StoreClientOptions& options, Deadline deadline) {
  StoreClientOptions address = options;
  const absl::StatusOr<int> fd =
      Dial(&address, deadline,
           [](const absl::Status& status) { return !IsFinal(status); });
  if (IsFinal(fd.status()) || absl::IsAborted(fd.status()) ||
      absl::IsNotFound(fd.status())) {
    return fd.status();
  }
  if (!fd.ok()) return absl::DeadlineExceededError(fd.status().message());
  return c10::make_intrusive<StoreClient>(
      std::move(address), *fd,
      absl::ToChronoMilliseconds(
          std::max(deadline.Left(), absl::Milliseconds(1))));
}

}  // namespace tessera
