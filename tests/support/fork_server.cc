// A request is one message: a Request, with its descriptors, and then the
// arguments and the environment, "NAME=VALUE", each of them ended by a zero.
// The answer is the process's id, or a negative errno.
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

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/env.h"
#include "comm/launch/subprocess.h"

namespace tessera {
namespace {

// The test process's end of the server's socket; -1 where there is no server.
int g_server = -1;

constexpr size_t kMostFds = 4;

struct Request {
  uint64_t arguments = 0, bytes = 0;
  uint64_t fds = 0;
  int numbers[kMostFds] = {};  // the child's, of each descriptor
};

bool SendBytes(int fd, const void* data, size_t bytes) {
  return send(fd, data, bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
}

bool ReceiveBytes(int fd, void* data, size_t bytes) {
  return recv(fd, data, bytes, MSG_WAITALL) == static_cast<ssize_t>(bytes);
}

struct Message {
  explicit Message(Request* request)
      : part{request, sizeof(*request)}, control{} {
    memset(&header, 0, sizeof(header));
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
  }
  iovec part;
  msghdr header;
  alignas(cmsghdr) char control[CMSG_SPACE(kMostFds * sizeof(int))];
};

bool SendRequest(int socket, const SelfExecOptions& options) {
  std::string text;
  const auto add = [&](absl::string_view word) {
    absl::StrAppend(&text, word, absl::string_view("", 1));
  };
  for (const std::string& argument : options.argv) add(argument);
  // A test may have changed it since the server began.
  for (char** entry = environ; *entry != nullptr; ++entry) add(*entry);
  for (const auto& [name, value] : options.env) {
    add(absl::StrCat(name, "=", value));
  }
  Request request;
  request.arguments = options.argv.size();
  request.bytes = text.size();
  request.fds = options.fds.size();
  int fds[kMostFds] = {};
  for (size_t i = 0; i < options.fds.size(); ++i) {
    fds[i] = options.fds[i].first;
    request.numbers[i] = options.fds[i].second;
  }
  Message message(&request);
  cmsghdr* const control = CMSG_FIRSTHDR(&message.header);
  control->cmsg_level = SOL_SOCKET;
  control->cmsg_type = SCM_RIGHTS;
  control->cmsg_len = CMSG_LEN(request.fds * sizeof(int));
  message.header.msg_controllen = CMSG_SPACE(request.fds * sizeof(int));
  memcpy(CMSG_DATA(control), fds, request.fds * sizeof(int));
  return sendmsg(socket, &message.header, MSG_NOSIGNAL) == sizeof(request) &&
         SendBytes(socket, text.data(), text.size());
}

// What a child is to be.
struct Child {
  std::vector<std::string> arguments;  // none: the test's own
  std::vector<std::string> environment;
  std::vector<std::pair<int, int>> fds;  // {the server's, the child's}
};

// Returns false at the end of the stream.
bool ReceiveRequest(int socket, Child* child) {
  Request request;
  Message message(&request);
  if (recvmsg(socket, &message.header, MSG_CMSG_CLOEXEC | MSG_WAITALL) !=
      sizeof(request)) {
    return false;
  }
  const cmsghdr* const control = CMSG_FIRSTHDR(&message.header);
  if (control == nullptr && request.fds > 0) return false;
  int fds[kMostFds];
  if (request.fds > 0) {
    memcpy(fds, CMSG_DATA(control), request.fds * sizeof(int));
  }
  for (size_t i = 0; i < request.fds; ++i) {
    child->fds.emplace_back(fds[i], request.numbers[i]);
  }
  std::string text(request.bytes, 0);
  if (!ReceiveBytes(socket, &text[0], text.size())) return false;
  std::vector<std::string> words = absl::StrSplit(text, '\0');
  words.pop_back();
  const auto end = words.begin() + static_cast<ptrdiff_t>(request.arguments);
  child->arguments.assign(words.begin(), end);
  child->environment.assign(end, words.end());
  return true;
}

// Turns the process into a child of `test`, as exec would have. It must be its
// new parent's child before it asks to die with it.
void BecomeChild(int server, pid_t test, const Child& child) {
  while (getppid() != test) {
    if (getppid() == 1 || kill(test, 0) != 0) _exit(1);
    usleep(100);
  }
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != test) _exit(1);
  close(server);
  // One may have another's number.
  constexpr int kAbove = 200;
  std::vector<int> moved;
  for (const auto& [fd, number] : child.fds) {
    moved.push_back(fcntl(fd, F_DUPFD_CLOEXEC, kAbove));
    close(fd);
  }
  for (size_t i = 0; i < moved.size(); ++i) {
    dup2(moved[i], child.fds[i].second);
    close(moved[i]);
  }
  clearenv();
  for (const std::string& entry : child.environment) {
    const std::pair<std::string, std::string> pair =
        absl::StrSplit(entry, absl::MaxSplits('=', 1));
    setenv(pair.first.c_str(), pair.second.c_str(), /*overwrite=*/1);
  }
}

// Returns the child's id in the server, 0 in the child itself.
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

// Words that live to the end, as those of main() do.
char** Arguments(const std::vector<std::string>& words) {
  auto* const kept = new std::vector<std::string>(words);
  auto* const argv = new std::vector<char*>;
  for (std::string& word : *kept) argv->push_back(&word[0]);
  argv->push_back(nullptr);
  return argv->data();
}

// Executes this program anew if the variable is not so (null: not there) yet.
void BeginWith(const char* name, const char* value, char** argv) {
  const std::optional<std::string> now = EnvString(name);
  if (value == nullptr ? !now.has_value() : now == value) return;
  if (value != nullptr) {
    setenv(name, value, /*overwrite=*/1);
  } else {
    unsetenv(name);
  }
  execv("/proc/self/exe", argv);
}

}  // namespace

absl::StatusOr<pid_t> ForkSelf(const SelfExecOptions& options) {
  if (g_server < 0) return SpawnSelf(options);
  pid_t id = -EPIPE;
  if (options.fds.size() > kMostFds || !SendRequest(g_server, options) ||
      !ReceiveBytes(g_server, &id, sizeof(id))) {
    id = -EPIPE;
  }
  if (id > 0) return id;
  return absl::UnavailableError(absl::StrCat("fork server: ", strerror(-id)));
}

void ServeForks(const char* mark, int* argc, char*** argv,
                const char* threads) {
  if (EnvString(mark).has_value()) return;
  BeginWith("OMP_NUM_THREADS", threads, *argv);
  const pid_t test = getpid();
  int sockets[2];
  if (prctl(PR_SET_CHILD_SUBREAPER, 1) != 0 ||
      socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) {
    return;
  }
  const pid_t server = fork();
  if (server != 0) {
    close(sockets[1]);
    if (server > 0) {
      g_server = sockets[0];
    } else {
      close(sockets[0]);
    }
    return;
  }
  close(sockets[0]);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  for (Child child; ReceiveRequest(sockets[1], &child); child = Child()) {
    const pid_t id = ForkOrphan();
    if (id == 0) {
      BecomeChild(sockets[1], test, child);
      if (child.arguments.empty()) return;
      *argc = static_cast<int>(child.arguments.size());
      *argv = Arguments(child.arguments);
      return;
    }
    for (const auto& [fd, number] : child.fds) close(fd);
    if (!SendBytes(sockets[1], &id, sizeof(id))) break;
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
