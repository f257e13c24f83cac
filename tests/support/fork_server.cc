// A request is one message: the number of bytes of the environment, with two
// descriptors, and then these bytes, "NAME=VALUE" each ended by a zero. The
// answer is the rank's process id, or a negative errno.
#include "tests/support/fork_server.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/env.h"
#include "base/status.h"
#include "comm/launch/subprocess.h"

namespace tessera {
namespace {

constexpr char kMark[] = "TESSERA_TEST_FORK_SERVER";  // the test process's id

bool SendBytes(int fd, const void* data, size_t bytes) {
  return send(fd, data, bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
}

bool ReceiveBytes(int fd, void* data, size_t bytes) {
  return recv(fd, data, bytes, MSG_WAITALL) == static_cast<ssize_t>(bytes);
}

// A message of one number and two descriptors.
struct Message {
  explicit Message(uint64_t* number)
      : part{number, sizeof(*number)}, control{} {
    memset(&header, 0, sizeof(header));
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
  }
  iovec part;
  msghdr header;
  alignas(cmsghdr) char control[CMSG_SPACE(2 * sizeof(int))];
};

bool SendRequest(int socket, const std::string& environment, int stderr_fd,
                 int socket_fd) {
  uint64_t bytes = environment.size();
  Message message(&bytes);
  cmsghdr* const control = CMSG_FIRSTHDR(&message.header);
  control->cmsg_level = SOL_SOCKET;
  control->cmsg_type = SCM_RIGHTS;
  control->cmsg_len = CMSG_LEN(2 * sizeof(int));
  const int fds[2] = {stderr_fd, socket_fd};
  memcpy(CMSG_DATA(control), fds, sizeof(fds));
  return sendmsg(socket, &message.header, MSG_NOSIGNAL) == sizeof(bytes) &&
         SendBytes(socket, environment.data(), environment.size());
}

// Returns false at the end of the stream.
bool ReceiveRequest(int socket, std::string* environment, int fds[2]) {
  uint64_t bytes = 0;
  Message message(&bytes);
  if (recvmsg(socket, &message.header, MSG_CMSG_CLOEXEC | MSG_WAITALL) !=
      sizeof(bytes)) {
    return false;
  }
  const cmsghdr* const control = CMSG_FIRSTHDR(&message.header);
  if (control == nullptr) return false;
  memcpy(fds, CMSG_DATA(control), 2 * sizeof(int));
  environment->resize(bytes);
  return ReceiveBytes(socket, environment->data(), bytes);
}

// Turns the process into a rank, as exec would have. It must be its new
// parent's child before it asks to die with it.
void BecomeRank(int server, pid_t test, const std::string& environment,
                const int fds[2]) {
  while (getppid() != test) {
    if (getppid() == 1 || kill(test, 0) != 0) _exit(1);
    usleep(100);
  }
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != test) _exit(1);
  close(server);
  // Either may have the other's number.
  const int err = fcntl(fds[0], F_DUPFD_CLOEXEC, 10);
  const int socket = fcntl(fds[1], F_DUPFD_CLOEXEC, 10);
  close(fds[0]);
  close(fds[1]);
  dup2(err, STDERR_FILENO);
  dup2(socket, ForkServer::kSocket);
  close(err);
  close(socket);
  clearenv();
  for (const absl::string_view entry :
       absl::StrSplit(environment, '\0', absl::SkipEmpty())) {
    const std::pair<std::string, std::string> pair =
        absl::StrSplit(entry, absl::MaxSplits('=', 1));
    setenv(pair.first.c_str(), pair.second.c_str(), /*overwrite=*/1);
  }
}

// Returns the rank's id in the server, 0 in the rank itself.
pid_t ForkOrphan() {
  int ids[2];
  if (pipe2(ids, O_CLOEXEC) != 0) return -errno;
  const pid_t between = fork();
  if (between == 0) {
    const pid_t rank = fork();
    if (rank == 0) {
      close(ids[0]);
      close(ids[1]);
      return 0;
    }
    const pid_t id = rank < 0 ? -errno : rank;
    _exit(write(ids[1], &id, sizeof(id)) == sizeof(id) ? 0 : 1);
  }
  pid_t id = between < 0 ? -errno : -EPIPE;
  close(ids[1]);
  if (between > 0) {
    if (read(ids[0], &id, sizeof(id)) != sizeof(id)) id = -EPIPE;
    waitpid(between, nullptr, 0);
  }
  close(ids[0]);
  return id;
}

}  // namespace

absl::StatusOr<ForkServer*> ForkServer::Get() {
  static const absl::StatusOr<ForkServer*>* const server =
      new absl::StatusOr<ForkServer*>(Start());
  return *server;
}

absl::StatusOr<ForkServer*> ForkServer::Start() {
  int sockets[2];
  if (prctl(PR_SET_CHILD_SUBREAPER, 1) != 0 ||
      socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) {
    return absl::UnavailableError(
        absl::StrCat("fork server: ", strerror(errno)));
  }
  SelfExecOptions child;
  child.argv = OwnArgv();
  child.env = {{kMark, absl::StrCat(getpid())}, {"OMP_NUM_THREADS", "1"}};
  child.fds = {{sockets[1], kSocket}};
  absl::StatusOr<pid_t> started = SpawnSelf(child);
  close(sockets[1]);
  if (!started.ok()) {
    close(sockets[0]);
    return started.status();
  }
  return new ForkServer(sockets[0]);
}

absl::StatusOr<pid_t> ForkServer::Fork(const Environment& env, int stderr_fd,
                                       int socket_fd) {
  std::string environment;  // a test may have changed it since the server began
  for (char** entry = environ; *entry != nullptr; ++entry) {
    absl::StrAppend(&environment, *entry, absl::string_view("", 1));
  }
  for (const auto& [name, value] : env) {
    absl::StrAppend(&environment, name, "=", value, absl::string_view("", 1));
  }
  pid_t id = -EPIPE;
  if (!SendRequest(socket_, environment, stderr_fd, socket_fd) ||
      !ReceiveBytes(socket_, &id, sizeof(id))) {
    id = -EPIPE;
  }
  if (id > 0) return id;
  return absl::UnavailableError(absl::StrCat("fork server: ", strerror(-id)));
}

void ServeForks() {
  const std::optional<std::string> mark = EnvString(kMark);
  if (!mark.has_value()) return;
  unsetenv(kMark);
  fcntl(ForkServer::kSocket, F_SETFD, FD_CLOEXEC);
  const auto test = static_cast<pid_t>(std::atoi(mark->c_str()));
  std::string environment;
  int fds[2];
  while (ReceiveRequest(ForkServer::kSocket, &environment, fds)) {
    const pid_t rank = ForkOrphan();
    if (rank == 0) {
      BecomeRank(ForkServer::kSocket, test, environment, fds);
      return;
    }
    close(fds[0]);
    close(fds[1]);
    if (!SendBytes(ForkServer::kSocket, &rank, sizeof(rank))) break;
  }
  _exit(0);
}

std::vector<std::string> OwnArgv() {
  std::vector<std::string> argv;
  std::string all;
  char buffer[4096];
  const int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
  for (ssize_t got; (got = read(fd, buffer, sizeof(buffer))) > 0;) {
    all.append(buffer, static_cast<size_t>(got));
  }
  close(fd);
  if (!all.empty()) all.pop_back();
  return absl::StrSplit(all, '\0');
}

}  // namespace tessera
