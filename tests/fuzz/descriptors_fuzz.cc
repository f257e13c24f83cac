// Messages with descriptors (comm/shm/descriptors.h), from a process that
// claims to share its memory.
//
// An input: how many descriptors, 0 to 5 (1 byte), and the message's bytes.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "base/check.h"
#include "comm/shm/descriptors.h"
#include "tests/fuzz/targets.h"

namespace tessera {
namespace {

constexpr size_t kMessageBytes = 24;
constexpr size_t kDescriptors = 2;
constexpr size_t kMost = 5;

// A message with `count` copies of `fd`.
void SendCopies(int to, absl::string_view bytes, size_t count, int fd) {
  iovec piece = {const_cast<char*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kMost * sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  if (count > 0) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(count * sizeof(int));
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(count * sizeof(int));
    const std::vector<int> copies(count, fd);
    std::memcpy(CMSG_DATA(header), copies.data(), count * sizeof(int));
  }
  TESSERA_CHECK_EQ(sendmsg(to, &message, MSG_NOSIGNAL),
                   static_cast<ssize_t>(bytes.size()));
}

void TakeMessage(absl::string_view input) {
  if (input.empty()) return;
  int fds[2];
  TESSERA_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
  const absl::Cleanup close_one = [&fds] { close(fds[0]); };
  const size_t count = static_cast<unsigned char>(input.front()) % (kMost + 1);
  SendCopies(fds[1], input.substr(1), count, fds[0]);
  close(fds[1]);
  std::string bytes(kMessageBytes, 0);
  std::vector<int> taken(kDescriptors, -1);
  const absl::Status status = shm::ReceiveDescriptors(fds[0], &bytes, &taken);
  // The socket is a stream: the rest of a longer message would be the next one.
  const bool good = input.size() > kMessageBytes && count == kDescriptors;
  TESSERA_CHECK_EQ(status.ok(), good) << status.message();
  if (!good) return;
  TESSERA_CHECK(bytes == input.substr(1, kMessageBytes));
  for (const int fd : taken) {
    TESSERA_CHECK(fcntl(fd, F_GETFD) == FD_CLOEXEC);
    close(fd);
  }
}

}  // namespace

FuzzTarget DescriptorsTarget() {
  return {"descriptors",
          TakeMessage,
          {std::string(1, 2) + std::string(kMessageBytes, 'p'),
           std::string(1, 2) + std::string(40, 'q'),
           std::string(1, 3) + std::string(kMessageBytes, 'r'),
           std::string(1, 0) + std::string(kMessageBytes, 's')}};
}

}  // namespace tessera
