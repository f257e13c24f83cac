#include "comm/connect/reception.h"

#include <errno.h>
#include <sys/socket.h>

#include <algorithm>
#include <utility>

#include "base/system/close_on_fork.h"
#include "comm/connect/job_secret.h"
#include "comm/connect/peer_user.h"
#include "comm/connect/sockets.h"

namespace tessera {
namespace {

// A rank proves itself in moments, and gives up after some seconds; others
// would hold descriptors for ever.
constexpr absl::Duration kStrangerTime = absl::Seconds(10);
constexpr absl::Duration kBriefTime = absl::Seconds(1);  // without descriptors
constexpr int kMaxStrangers = 16;  // beside as many as come at once
constexpr int kTickMs = 100;       // how often these times are looked at
constexpr int kAcceptsPerLook = 64;

}  // namespace

Reception::Reception(int listen_fd, Options options)
    : listen_fd_(listen_fd), options_(std::move(options)) {}

Reception::~Reception() {
  for (const Visitor& visitor : visitors_) CloseDescriptor(visitor.fd);
}

void Reception::AddTo(std::vector<pollfd>* fds) const {
  fds->push_back({starved_ ? -1 : listen_fd_, POLLIN, 0});
  for (const Visitor& visitor : visitors_) {
    fds->push_back({visitor.fd, POLLIN, 0});
  }
}

int Reception::timeout_ms() const {
  return starved_ || !visitors_.empty() ? kTickMs : -1;
}

std::vector<Guest> Reception::Look(const pollfd* fds) {
  std::vector<Guest> guests;
  const bool knocked = starved_ || fds->revents != 0;
  for (auto it = visitors_.begin(); it != visitors_.end();) {
    ++fds;
    if (fds->revents != 0 && !Read(&*it)) {
      CloseDescriptor(it->fd);
      it = visitors_.erase(it);
    } else if (it->greeting.there()) {
      guests.push_back({it->fd, it->greeting.rank()});
      it = visitors_.erase(it);
    } else {
      ++it;
    }
  }
  if (knocked) Accept();
  while (DropStranger(kStrangerTime)) {
  }
  return guests;
}

bool Reception::Read(Visitor* visitor) {
  // No more than the handshake: what follows is somebody else's.
  char buffer[64];
  const size_t wanted = std::min(visitor->greeting.wanted(), sizeof(buffer));
  const ssize_t got = recv(visitor->fd, buffer, wanted, MSG_DONTWAIT);
  if (got < 0) return errno == EAGAIN || errno == EINTR;
  if (got == 0) return false;
  std::string answer;
  if (!visitor->greeting.Take({buffer, static_cast<size_t>(got)}, &answer)) {
    return false;
  }
  // A few bytes into an empty connection: whole, or it is broken.
  return answer.empty() || send(visitor->fd, answer.data(), answer.size(),
                                MSG_NOSIGNAL | MSG_DONTWAIT) ==
                               static_cast<ssize_t>(answer.size());
}

void Reception::Accept() {
  starved_ = false;
  for (int i = 0; i < kAcceptsPerLook; ++i) {
    const int fd = OpenCloseOnFork([&] {
      return accept4(listen_fd_, nullptr, nullptr,
                     SOCK_CLOEXEC | SOCK_NONBLOCK);
    });
    if (fd < 0) {
      const bool no_descriptors = errno == EMFILE || errno == ENFILE ||
                                  errno == ENOBUFS || errno == ENOMEM;
      // One that is held in silence, or not at once again.
      if (no_descriptors && DropStranger(kBriefTime)) continue;
      starved_ = no_descriptors;
      return;
    }
    // With a secret the proof says more; and ranks may be of several users.
    if (!HasJobSecret() && OfAnotherUser(fd)) {
      CloseDescriptor(fd);
      continue;
    }
    KeepAlive(fd);
    visitors_.emplace_back(fd, options_.clock(), options_);
    // In a crowd it might be closed before it is heard.
    if (!Read(&visitors_.back())) {
      CloseDescriptor(fd);
      visitors_.pop_back();
      continue;
    }
    const auto strangers =
        std::count_if(visitors_.begin(), visitors_.end(),
                      [](const Visitor& v) { return !v.greeting.proven(); });
    if (strangers > options_.at_once + kMaxStrangers) {
      DropStranger(absl::ZeroDuration());
    }
  }
}

bool Reception::DropStranger(absl::Duration age) {
  const auto oldest =
      std::find_if(visitors_.begin(), visitors_.end(),
                   [](const Visitor& v) { return !v.greeting.proven(); });
  if (oldest == visitors_.end() || options_.clock() - oldest->since < age) {
    return false;
  }
  CloseDescriptor(oldest->fd);
  visitors_.erase(oldest);
  return true;
}

}  // namespace tessera
