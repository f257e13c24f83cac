#include "comm/shm/descriptors.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"
#include "base/system/close_on_fork.h"
#include "base/thread/start_thread.h"
#include "comm/connect/keyed_hash.h"

// Why a socket: a descriptor means nothing in another process unless the kernel
// carries it there (SCM_RIGHTS). Why one without a name in the file system:
// nothing is left of it when a process is killed, and no folder has to be
// writable. Anybody in this network namespace could connect to it, so each side
// looks at the user of the other (SO_PEERCRED); who merely has the name of the
// socket, but runs as another user, gets nothing.
namespace tessera::shm {
namespace {

constexpr size_t kMaxDescriptors = 4;
// How often an offer looks whether it is to end, and tries again.
constexpr int kLookMs = 20;

// The envelope of a message with so many descriptors.
struct Envelope {
  Envelope(std::string* bytes, size_t num_descriptors)
      : piece{bytes->data(), bytes->size()} {
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(num_descriptors * sizeof(int));
  }
  iovec piece;
  alignas(cmsghdr) char control[CMSG_SPACE(kMaxDescriptors * sizeof(int))] = {};
  msghdr message{};
};

absl::Status Failed(const char* what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(errno)));
}

// The name begins with a zero byte: it is in no file system.
socklen_t AddressOf(const std::string& name, sockaddr_un* address) {
  *address = {};
  address->sun_family = AF_UNIX;
  std::memcpy(address->sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 +
                                name.size());
}

bool SameUser(int fd) {
  ucred peer{};
  socklen_t bytes = sizeof(peer);
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 &&
         peer.uid == geteuid();
}

void Send(int fd, std::string bytes, const std::vector<int>& descriptors) {
  Envelope envelope(&bytes, descriptors.size());
  const size_t size = descriptors.size() * sizeof(int);
  cmsghdr* header = CMSG_FIRSTHDR(&envelope.message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(size);
  std::memcpy(CMSG_DATA(header), descriptors.data(), size);
  // If this fails the other side says so.
  (void)sendmsg(fd, &envelope.message, MSG_NOSIGNAL);
}

// What has come with a message is this process's, whatever the message is.
void CloseAll(const cmsghdr* header) {
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS) return;
  std::vector<int> descriptors((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
  std::memcpy(descriptors.data(), CMSG_DATA(header),
              descriptors.size() * sizeof(int));
  for (int descriptor : descriptors) close(descriptor);
}

}  // namespace

absl::StatusOr<std::unique_ptr<DescriptorOffer>> DescriptorOffer::Start(
    std::vector<int> descriptors, std::string bytes, int takers) {
  TESSERA_CHECK_LE(descriptors.size(), kMaxDescriptors);
  auto offer = std::unique_ptr<DescriptorOffer>(
      new DescriptorOffer(std::move(descriptors), std::move(bytes)));
  offer->name_ = absl::StrCat("tessera-", RandomToken());
  sockaddr_un address;
  const socklen_t size = AddressOf(offer->name_, &address);
  offer->listener_ = OpenCloseOnFork(
      [] { return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0); });
  if (offer->listener_ < 0 ||
      bind(offer->listener_, reinterpret_cast<sockaddr*>(&address), size) !=
          0 ||
      listen(offer->listener_, takers) != 0) {
    return Failed("listening on a local socket");
  }
  TESSERA_ASSIGN_OR_RETURN(
      offer->thread_,
      StartThread("tessera-offer", [raw = offer.get()] { raw->Serve(); }));
  return offer;
}

DescriptorOffer::~DescriptorOffer() {
  done_ = true;
  if (thread_.joinable()) thread_.join();
  if (listener_ >= 0) CloseDescriptor(listener_);
}

void DescriptorOffer::Serve() {
  while (!done_) {
    pollfd waiting = {listener_, POLLIN, 0};
    if (poll(&waiting, 1, kLookMs) <= 0) continue;
    const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) {
      // No descriptor is left. Who asks still waits, so that poll would not.
      poll(nullptr, 0, kLookMs);
      continue;
    }
    if (SameUser(fd)) Send(fd, bytes_, descriptors_);
    close(fd);
  }
}

absl::Status ReceiveDescriptors(int fd, std::string* bytes,
                                std::vector<int>* descriptors) {
  Envelope envelope(bytes, descriptors->size());
  const size_t size = descriptors->size() * sizeof(int);
  // With a timeout it is not begun again by itself after an interruption, of
  // which io_uring, too, makes some.
  const ssize_t got =
      TEMP_FAILURE_RETRY(recvmsg(fd, &envelope.message, MSG_CMSG_CLOEXEC));
  if (got < 0) return Failed("recvmsg");
  const cmsghdr* header = CMSG_FIRSTHDR(&envelope.message);
  if (got != static_cast<ssize_t>(bytes->size()) || header == nullptr ||
      (envelope.message.msg_flags & MSG_CTRUNC) != 0 ||
      header->cmsg_type != SCM_RIGHTS || header->cmsg_len != CMSG_LEN(size)) {
    CloseAll(header);
    return absl::UnavailableError("it sent no memory");
  }
  std::memcpy(descriptors->data(), CMSG_DATA(header), size);
  return absl::OkStatus();
}

absl::Status TakeDescriptors(const std::string& name, absl::Duration timeout,
                             std::string* bytes,
                             std::vector<int>* descriptors) {
  sockaddr_un address;
  if (name.size() + 1 > sizeof(address.sun_path)) {
    return absl::UnavailableError("its socket's name is too long");
  }
  const socklen_t size = AddressOf(name, &address);
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return Failed("socket");
  const absl::Cleanup close_fd = [fd] { close(fd); };
  const timeval patience = absl::ToTimeval(timeout);
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  // Limits connect, where too many wait already.
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
  if (TEMP_FAILURE_RETRY(
          connect(fd, reinterpret_cast<sockaddr*>(&address), size)) != 0) {
    return Failed("connecting to its local socket");
  }
  if (!SameUser(fd)) return absl::UnavailableError("another user runs it");
  return ReceiveDescriptors(fd, bytes, descriptors);
}

}  // namespace tessera::shm
