#include "tests/support/process.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "comm/launch/subprocess.h"
#include "tests/support/fork_server.h"

namespace tessera {

Process::Process(std::vector<std::string> args, Env env, bool by_exec) {
  int out[2];
  int err[2];
  if (pipe2(out, O_CLOEXEC) != 0 || pipe2(err, O_CLOEXEC) != 0) abort();
  SelfExecOptions options;
  options.argv = {"program"};
  options.argv.insert(options.argv.end(), args.begin(), args.end());
  options.env = std::move(env);
  options.fds = {{out[1], STDOUT_FILENO}, {err[1], STDERR_FILENO}};
  pid_ = (by_exec ? SpawnSelf(options) : ForkSelf(options)).value();
  close(out[1]);
  close(err[1]);
  pipes_[0] = out[0];
  pipes_[1] = err[0];
}

Process::~Process() {
  if (pid_ != 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  for (int fd : pipes_) {
    if (fd >= 0) close(fd);
  }
}

Finished Process::Finish(absl::Duration allowed) {
  Finished result;
  const absl::Time deadline = absl::Now() + allowed;
  while ((pipes_[0] >= 0 || pipes_[1] >= 0) && absl::Now() < deadline) {
    Read(deadline);
  }
  result.took = absl::Now() - begin_;
  const bool ended = pipes_[0] < 0 && pipes_[1] < 0;
  if (!ended) kill(pid_, SIGKILL);
  int wait_status = 0;
  waitpid(pid_, &wait_status, 0);
  pid_ = 0;
  if (ended) result.code = ShellExitCode(wait_status);
  result.out = text_[0];
  result.err = text_[1];
  return result;
}

bool Process::WaitForLines(int count) {
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  while (std::count(text_[0].begin(), text_[0].end(), '\n') < count) {
    if (absl::Now() >= deadline || pipes_[0] < 0) return false;
    Read(deadline);
  }
  return true;
}

void Process::Read(absl::Time deadline) {
  pollfd fds[2] = {{pipes_[0], POLLIN, 0}, {pipes_[1], POLLIN, 0}};
  const auto left = absl::ToInt64Milliseconds(deadline - absl::Now()) + 1;
  if (poll(fds, 2, static_cast<int>(left)) <= 0) return;
  for (int i = 0; i < 2; ++i) {
    if (fds[i].revents == 0) continue;
    char buffer[4096];
    const ssize_t got = read(pipes_[i], buffer, sizeof(buffer));
    if (got > 0) {
      text_[i].append(buffer, got);
    } else {
      close(pipes_[i]);
      pipes_[i] = -1;
    }
  }
}

ListeningPort::ListeningPort()
    : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_ANY);
  socklen_t length = sizeof(address);
  auto* const plain = reinterpret_cast<sockaddr*>(&address);
  if (bind(fd_, plain, length) != 0 || listen(fd_, 16) != 0 ||
      getsockname(fd_, plain, &length) != 0) {
    abort();
  }
  port_ = ntohs(address.sin_port);
}

ListeningPort::~ListeningPort() { close(fd_); }

int FreePort() { return ListeningPort().port(); }

}  // namespace tessera
