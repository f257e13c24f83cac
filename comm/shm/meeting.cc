#include "comm/shm/meeting.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status.h"
#include "comm/shm/arena.h"
#include "comm/shm/channels.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace tessera::shm {
namespace {

// What goes over the socket, with the two descriptors.
struct Hello {
  uint64_t proof[2];
  int64_t heap_bytes;
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

void SendHello(int fd, const Hello& hello, const int (&descriptors)[2]) {
  Hello copy = hello;
  iovec part = {&copy, sizeof(copy)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(descriptors))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(descriptors));
  std::memcpy(CMSG_DATA(header), descriptors, sizeof(descriptors));
  // If this fails the other side says so.
  (void)sendmsg(fd, &message, MSG_NOSIGNAL);
}

absl::Status ReceiveHello(int fd, Hello* hello, int (*descriptors)[2]) {
  iovec part = {hello, sizeof(*hello)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(*descriptors))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t got = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
  if (got < 0) return Failed("recvmsg");
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (got != sizeof(*hello) || header == nullptr ||
      header->cmsg_type != SCM_RIGHTS ||
      header->cmsg_len != CMSG_LEN(sizeof(*descriptors))) {
    return absl::UnavailableError("it sent no memory");
  }
  std::memcpy(*descriptors, CMSG_DATA(header), sizeof(*descriptors));
  return absl::OkStatus();
}

std::vector<uint8_t> BytesOf(const std::string& text) {
  return std::vector<uint8_t>(text.begin(), text.end());
}

}  // namespace

HostMemory::~HostMemory() {
  for (const Mapping& mapping : mappings_) munmap(mapping.data, mapping.bytes);
}

class Meeting {
 public:
  Meeting(c10d::Store& store, int rank, int world_size, absl::Duration timeout,
          std::vector<int> names)
      : store_(store),
        rank_(rank),
        world_size_(world_size),
        timeout_(timeout),
        names_(std::move(names)),
        memory_(new HostMemory) {}
  ~Meeting();

  absl::StatusOr<std::unique_ptr<HostMemory>> Run();

 private:
  absl::Status Offer();
  absl::Status Take(int peer);
  void Serve();
  absl::StatusOr<char*> Map(int fd, int64_t bytes, bool writable);
  std::string Read(const std::string& key);
  std::string NameOf(int peer) const {
    return absl::StrCat("rank ", names_.empty() ? peer : names_[peer]);
  }

  c10d::Store& store_;
  const int rank_;
  const int world_size_;
  const absl::Duration timeout_;
  const std::vector<int> names_;
  std::unique_ptr<HostMemory> memory_;
  int head_fd_ = -1;
  int listener_ = -1;
  Hello hello_{};
  std::string name_;
  std::atomic<bool> done_{false};
  std::thread server_;
};

Meeting::~Meeting() {
  done_ = true;
  if (server_.joinable()) server_.join();
  if (listener_ >= 0) close(listener_);
  if (head_fd_ >= 0) close(head_fd_);
}

absl::StatusOr<char*> Meeting::Map(int fd, int64_t bytes, bool writable) {
  TESSERA_ASSIGN_OR_RETURN(char* const data, MapMemory(fd, bytes, writable));
  memory_->mappings_.push_back({data, bytes});
  return data;
}

std::string Meeting::Read(const std::string& key) {
  store_.wait({key}, absl::ToChronoMilliseconds(timeout_));
  const std::vector<uint8_t> bytes = store_.get(key);
  return std::string(bytes.begin(), bytes.end());
}

// Makes this rank's memory, and listens.
absl::Status Meeting::Offer() {
  TESSERA_ASSIGN_OR_RETURN(Arena* const arena, Arena::Get());
  TESSERA_ASSIGN_OR_RETURN(head_fd_, MakeMemory("tessera-head", kHeadBytes));
  TESSERA_ASSIGN_OR_RETURN(char* const head, Map(head_fd_, kHeadBytes, true));
  memory_->members_[rank_] = {head, arena->data()};
  memory_->heap_bytes_ = arena->bytes();

  std::random_device random;
  for (uint64_t& word : hello_.proof) {
    word = uint64_t{random()} << 32 | random();
  }
  hello_.heap_bytes = arena->bytes();
  // Stands where staging begins, until the first collective.
  std::memcpy(head + kControlBytes, hello_.proof, sizeof(hello_.proof));

  name_ = absl::StrFormat("tessera-%08x%08x%08x", random(), random(), random());
  sockaddr_un address;
  const socklen_t bytes = AddressOf(name_, &address);
  listener_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (listener_ < 0 ||
      bind(listener_, reinterpret_cast<sockaddr*>(&address), bytes) != 0 ||
      listen(listener_, world_size_) != 0) {
    return Failed("listening on a local socket");
  }
  server_ = std::thread([this] { Serve(); });
  return absl::OkStatus();
}

void Meeting::Serve() {
  const int descriptors[2] = {head_fd_, (*Arena::Get())->fd()};
  while (!done_) {
    pollfd waiting = {listener_, POLLIN, 0};
    if (poll(&waiting, 1, /*milliseconds=*/20) <= 0) continue;
    const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) continue;
    if (SameUser(fd)) SendHello(fd, hello_, descriptors);
    close(fd);
  }
}

absl::Status Meeting::Take(int peer) {
  const std::string name = Read(absl::StrCat("name/", peer));
  if (name.empty()) return absl::OkStatus();  // it has failed, and will say why
  sockaddr_un address;
  if (name.size() + 1 > sizeof(address.sun_path)) {
    return absl::UnavailableError("its socket's name is too long");
  }
  const socklen_t bytes = AddressOf(name, &address);
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return Failed("socket");
  const absl::Cleanup close_fd = [fd] { close(fd); };
  const timeval patience = absl::ToTimeval(timeout_);
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), bytes) != 0) {
    return Failed("connecting to its local socket");
  }
  if (!SameUser(fd)) return absl::UnavailableError("another user runs it");
  Hello hello{};
  int descriptors[2];
  TESSERA_RETURN_IF_ERROR(ReceiveHello(fd, &hello, &descriptors));
  const absl::Cleanup close_both = [&descriptors] {
    for (int descriptor : descriptors) close(descriptor);
  };
  if (hello.heap_bytes != hello_.heap_bytes) {
    return absl::UnavailableError("it sees another size of memory");
  }
  TESSERA_ASSIGN_OR_RETURN(char* const head,
                           Map(descriptors[0], kHeadBytes, true));
  TESSERA_ASSIGN_OR_RETURN(char* const heap,
                           Map(descriptors[1], hello.heap_bytes, false));
  if (std::memcmp(head + kControlBytes, hello.proof, sizeof(hello.proof)) !=
      0) {
    return absl::UnavailableError("its memory is not what it says");
  }
  memory_->members_[peer] = {head, heap};
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<HostMemory>> Meeting::Run() {
  memory_->members_.resize(world_size_);
  absl::Status mine = Offer();
  store_.set(absl::StrCat("name/", rank_), BytesOf(mine.ok() ? name_ : ""));
  for (int peer = 0; peer < world_size_ && mine.ok(); ++peer) {
    if (peer == rank_) continue;
    mine = Annotate(Take(peer), NameOf(peer));
  }
  store_.set(absl::StrCat("verdict/", rank_),
             BytesOf(mine.ok() ? "" : std::string(mine.message())));
  absl::Status all;
  for (int peer = 0; peer < world_size_; ++peer) {
    const std::string verdict = Read(absl::StrCat("verdict/", peer));
    if (verdict.empty() || !all.ok()) continue;
    all = absl::UnavailableError(absl::StrCat(
        "the ranks cannot share memory: [", NameOf(peer), "] ", verdict));
  }
  // Nobody writes where the proofs stand before all have looked.
  TESSERA_RETURN_IF_ERROR(all);
  return std::move(memory_);
}

absl::StatusOr<std::unique_ptr<HostMemory>> MeetOnHost(c10d::Store& store,
                                                       int rank, int world_size,
                                                       absl::Duration timeout,
                                                       std::vector<int> names) {
  return Meeting(store, rank, world_size, timeout, std::move(names)).Run();
}

}  // namespace tessera::shm
