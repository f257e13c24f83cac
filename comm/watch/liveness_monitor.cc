// A connection begins with the handshake (comm/connect/handshake.h); after
// that come frames (liveness_frames.h), both ways.
//
// Why a connection of its own: the transports cannot tell. Over shared memory a
// dead rank looks like a slow one for ever; over TCP only those notice that
// have bytes under way with it, and the store that holds what it announced
// may have died with it. Why a star around rank 0 and not connections between
// all: at 1,000 ranks those would be 500,000, and what rank 0 alone sees it
// passes on. Why a bye: a rank that leaves has done its part of everything, and
// waits that are still under way elsewhere must not end because of it, while
// one that vanished without a word must end them.
#include "comm/watch/liveness_monitor.h"

#include <errno.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/log.h"
#include "base/system/close_on_fork.h"
#include "base/thread/start_thread.h"
#include "base/torch_guard.h"
#include "comm/connect/handshake.h"
#include "comm/connect/job_secret.h"
#include "comm/connect/sockets.h"
#include "comm/launch/launcher.h"
#include "comm/rendezvous/local_address.h"
#include "comm/watch/liveness_frames.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace tessera {
namespace {

constexpr char kKey[] = "liveness";
constexpr int kNewsTickMs = 100;

constexpr char kPurpose[] = "liveness";

std::atomic<pid_t> g_process{0};  // whose monitors these are
ABSL_CONST_INIT absl::Mutex g_all_mutex(absl::kConstInit);
std::vector<LivenessMonitor*>& All()
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(g_all_mutex) {
  static auto* const all = new std::vector<LivenessMonitor*>;
  return *all;
}

}  // namespace

std::unique_ptr<LivenessMonitor> LivenessMonitor::Create(
    c10d::Store& store, int rank, int world_size, bool same_host, Clock clock) {
  auto liveness = std::unique_ptr<LivenessMonitor>(
      new LivenessMonitor(rank, world_size, std::move(clock)));
  liveness->news_fd_ = TakeLauncherNews();
  if (rank == 0) {
    liveness->Listen(store, same_host);
  } else {
    liveness->Connect(store);
  }
  {
    // Without a connection the launcher is all that there is to be heard.
    MonotonicMutexLock lock(&liveness->mutex_);
    if (!liveness->thread_.joinable() && liveness->news_fd_ >= 0) {
      liveness->StartThread();
    }
  }
  absl::MutexLock lock(&g_all_mutex);
  g_process = getpid();
  static const int registered = std::atexit(&LivenessMonitor::AllSayBye);
  (void)registered;
  All().push_back(liveness.get());
  return liveness;
}

void LivenessMonitor::Listen(c10d::Store& store, bool same_host) {
  const Listener listener =
      tessera::Listen(same_host, world_size_, NetworkId());
  listen_fd_ = listener.fd;
  // Empty: the others go without, too.
  const absl::Status told =
      CatchTorch("store", [&] { store.set(kKey, listener.where); });
  MonotonicMutexLock lock(&mutex_);
  if (!told.ok() || listen_fd_ < 0) return;
  Reception::Options options;
  options.key = JobKey(kPurpose, listener.token);
  options.own = rank_;
  options.world_size = options.at_once = world_size_;
  options.clock = clock_;
  reception_ = std::make_unique<Reception>(listen_fd_, std::move(options));
  StartThread();
}

void LivenessMonitor::Connect(c10d::Store& store) {
  const absl::StatusOr<std::string> where = CatchTorch(
      "store", [&]() -> std::string { return store.get_to_str(kKey); });
  if (!where.ok()) return;
  const Endpoint rank0 = ParseEndpoint(*where, NetworkId());
  if (rank0.token.empty()) return;
  Peer peer;
  peer.fd = ConnectAs(rank_, rank0, kPurpose);
  peer.rank = 0;
  if (peer.fd < 0) {
    TESSERA_LOG(WARNING) << "cannot connect to rank 0 at any of "
                         << absl::StrJoin(rank0.addresses, ", ")
                         << ": the end of a rank may be noticed late";
    return;
  }
  MonotonicMutexLock lock(&mutex_);
  peers_.push_back(peer);
  StartThread();
}

void LivenessMonitor::StartThread() {
  stop_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (stop_fd_ < 0) return;
  auto thread = tessera::StartThread("tessera-life", [this] { Run(); });
  if (!thread.ok()) {
    TESSERA_LOG(WARNING) << thread.status().message();
    return;
  }
  connected_ = true;
  thread_ = *std::move(thread);
}

LivenessMonitor::~LivenessMonitor() {
  {
    absl::MutexLock lock(&g_all_mutex);
    All().erase(std::find(All().begin(), All().end(), this));
  }
  SayBye();
  if (thread_.joinable()) {
    eventfd_write(stop_fd_, 1);
    thread_.join();
  }
  MonotonicMutexLock lock(&mutex_);
  for (const Peer& peer : peers_) CloseDescriptor(peer.fd);
  if (stop_fd_ >= 0) close(stop_fd_);
  if (news_fd_ >= 0) close(news_fd_);
  if (listen_fd_ >= 0) CloseDescriptor(listen_fd_);
}

void LivenessMonitor::SayBye() {
  MonotonicMutexLock lock(&mutex_);
  for (const Peer& peer : peers_) Tell(peer.fd, 'b', rank_);
}

void LivenessMonitor::AllSayBye() {
  if (getpid() != g_process) return;  // a forked child, which is no rank
  absl::MutexLock lock(&g_all_mutex);
  for (LivenessMonitor* liveness : All()) liveness->SayBye();
}

void LivenessMonitor::Tell(int fd, char kind, int rank) {
  const std::string frame = LivenessFrame{kind, rank}.Encode();
  // A few bytes into an empty connection: whole, or it is broken.
  (void)send(fd, frame.data(), frame.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

std::vector<EndedRank> LivenessMonitor::Ended() const {
  MonotonicMutexLock lock(&mutex_);
  return ended_;
}

bool LivenessMonitor::WaitForEnd(absl::Duration timeout) const {
  auto known = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return !ended_.empty() || !connected_;
  };
  MonotonicMutexLock lock(&mutex_);
  mutex_.AwaitFor(absl::Condition(&known), timeout);
  return !ended_.empty();
}

bool LivenessMonitor::Rank0Answers(absl::Duration timeout) const {
  MonotonicMutexLock lock(&mutex_);
  if (rank_ == 0 || peers_.empty()) return true;
  answered_ = false;
  for (const Peer& peer : peers_) Tell(peer.fd, 'p', rank_);
  return mutex_.AwaitFor(absl::Condition(&answered_), timeout);
}

void LivenessMonitor::Run() {
  std::vector<pollfd> fds;
  while (true) {
    fds = {{stop_fd_, POLLIN, 0}, {news_fd_, POLLIN, 0}};
    const size_t others = fds.size();
    {
      MonotonicMutexLock lock(&mutex_);
      for (const Peer& peer : peers_) fds.push_back({peer.fd, POLLIN, 0});
    }
    const size_t visitors = fds.size();
    if (reception_ != nullptr) reception_->AddTo(&fds);
    int timeout_ms = reception_ == nullptr ? -1 : reception_->timeout_ms();
    if (!news_.empty()) timeout_ms = kNewsTickMs;
    if (poll(fds.data(), fds.size(), timeout_ms) < 0) continue;
    if (fds[0].revents != 0) return;
    if (fds[1].revents != 0) ReadNews();
    MonotonicMutexLock lock(&mutex_);
    NoteNews();
    // Only this thread changes peers_ once it runs.
    for (size_t i = visitors; i-- > others;) {
      Peer& peer = peers_[i - others];
      if (fds[i].revents == 0 || Read(&peer)) continue;
      const Peer lost = std::move(peer);
      peers_.erase(peers_.begin() + static_cast<std::ptrdiff_t>(i - others));
      CloseDescriptor(lost.fd);
      Lost(lost);
    }
    if (reception_ != nullptr) {
      for (const Guest& guest : reception_->Look(&fds[visitors])) {
        Welcome(guest);
      }
    } else if (peers_.empty() && news_fd_ < 0) {
      connected_ = false;
      return;
    }
  }
}

void LivenessMonitor::ReadNews() {
  int32_t rank = -1;
  const ssize_t got = recv(news_fd_, &rank, sizeof(rank), MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got != sizeof(rank)) {  // the launcher has gone
    close(news_fd_);
    news_fd_ = -1;
  } else if (rank >= 0 && rank < world_size_ && rank != rank_) {
    news_.emplace_back(rank, clock_());
  }
}

void LivenessMonitor::NoteNews() {
  while (!news_.empty() && clock_() - news_.front().second >= kNewsGrace) {
    Note(news_.front().first, /*left=*/false);
    news_.erase(news_.begin());
  }
}

void LivenessMonitor::Welcome(const Guest& guest) {
  Peer peer;
  peer.fd = guest.fd;
  peer.rank = guest.rank;
  for (const EndedRank& ended : ended_) {
    Tell(peer.fd, ended.left ? 'b' : 'g', ended.rank);
  }
  peers_.push_back(std::move(peer));
}

bool LivenessMonitor::Read(Peer* peer) {
  return ReceiveSome(peer->fd, &peer->in, 256) && Understand(peer);
}

bool LivenessMonitor::Understand(Peer* peer) {
  LivenessFrame frame;
  while (peer->in.size() >= LivenessFrame::kBytes) {
    if (!frame.Take(&peer->in, world_size_)) return false;
    if (frame.kind == 'p') {
      answered_ = true;
      if (rank_ == 0) Tell(peer->fd, 'p', frame.rank);
      continue;
    }
    if (frame.kind == 'b' && frame.rank == peer->rank) peer->left = true;
    Note(frame.rank, frame.kind == 'b');
  }
  return true;
}

void LivenessMonitor::Lost(const Peer& peer) {
  if (!peer.left) Note(peer.rank, /*left=*/false);
}

void LivenessMonitor::Note(int rank, bool left) {
  const bool known =
      std::any_of(ended_.begin(), ended_.end(),
                  [&](const EndedRank& e) { return e.rank == rank; });
  if (known) return;
  ended_.push_back({rank, left, clock_()});
  if (rank_ != 0) return;
  for (const Peer& peer : peers_) {
    if (peer.rank > 0 && peer.rank != rank) {
      Tell(peer.fd, left ? 'b' : 'g', rank);
    }
  }
}

}  // namespace tessera
