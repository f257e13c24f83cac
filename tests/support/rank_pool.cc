#include "tests/support/rank_pool.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/env.h"
#include "base/status.h"
#include "comm/launch/launcher.h"
#include "comm/launch/subprocess.h"
#include "tests/support/rank_frames.h"

namespace tessera {
namespace {

constexpr absl::Duration kEndTimeout = absl::Seconds(5);
constexpr size_t kMaxErrBytes = 8 << 10;

std::map<int, std::unique_ptr<RankPool>>& Pools() {
  static auto* const pools = new std::map<int, std::unique_ptr<RankPool>>;
  return *pools;
}

RankPool::Starts& AllStarts() {
  static auto* const starts = new RankPool::Starts;
  return *starts;
}

void Close(int* fd) {
  if (*fd >= 0) close(*fd);
  *fd = -1;
}

std::string WithStderr(const std::string& err) {
  if (err.empty()) return "";
  return absl::StrCat("\nits stderr:\n", err);
}

}  // namespace

std::string DefaultBackend() {
  return EnvString("TESSERA_TEST_BACKEND").value_or("shm");
}

std::string DefaultMemoryGroup(int rank) {
  return DefaultBackend() == "hierarchical" ? absl::StrCat(rank / 2) : "";
}

RankPool* RankPool::Get(int world_size) {
  std::unique_ptr<RankPool>& pool = Pools()[world_size];
  if (pool == nullptr) {
    RankPoolOptions options;
    options.world_size = world_size;
    pool = std::make_unique<RankPool>(options);
  }
  return pool.get();
}

void RankPool::EndAll() { Pools().clear(); }

const RankPool::Starts& RankPool::starts() { return AllStarts(); }

RankPool::RankPool(RankPoolOptions options)
    : options_(options), ranks_(options.world_size) {}

RankPool::~RankPool() { End(); }

absl::Status RankPool::Start() {
  ranks_.assign(options_.world_size, Rank());
  TESSERA_ASSIGN_OR_RETURN(HostedStore store,
                           HostedStore::Start(options_.world_size));
  store_ = std::make_unique<HostedStore>(std::move(store));
  running_ = true;
  for (int r = 0; r < options_.world_size; ++r) {
    TESSERA_RETURN_IF_ERROR(StartRank(r));
  }
  for (const auto& hello : Exchange("", "start-up", kStartTimeout)) {
    TESSERA_RETURN_IF_ERROR(hello);
  }
  return absl::OkStatus();
}

// Ranks are started by exec where libraries must be loaded anew: for another
// number of OpenMP's threads, and for CUDA, which does not survive a fork.
absl::StatusOr<pid_t> RankPool::StartProcess(const Environment& env,
                                             int stderr_fd,
                                             int socket_fd) const {
  SelfExecOptions child;
  child.argv = OwnArgv();
  child.env = env;
  child.fds = {{stderr_fd, STDERR_FILENO}, {socket_fd, kWorkerSocket}};
  const bool may_fork = !options_.by_exec && options_.threads_per_rank == 1 &&
                        options_.backend != "nccl";
  return may_fork ? ForkSelf(child) : SpawnSelf(child);
}

absl::Status RankPool::StartRank(int r) {
  int sockets[2];
  int err_pipe[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0 ||
      pipe2(err_pipe, O_CLOEXEC) != 0) {
    return absl::UnavailableError(absl::StrCat("pipe: ", strerror(errno)));
  }
  Environment env =
      LocalRankEnvironment(r, options_.world_size, store_->Environment());
  env.emplace_back("OMP_NUM_THREADS", absl::StrCat(options_.threads_per_rank));
  env.emplace_back(
      kWorkerMark,
      absl::StrCat(absl::FormatDuration(options_.collective_timeout), " ",
                   absl::FormatDuration(options_.announce_grace), " ",
                   options_.backend, " ",
                   options_.hosts.empty() ? DefaultMemoryGroup(r)
                                          : absl::StrCat(options_.hosts[r])));
  absl::StatusOr<pid_t> pid = StartProcess(env, err_pipe[1], sockets[1]);
  close(sockets[1]);
  close(err_pipe[1]);
  ranks_[r].socket = sockets[0];
  ranks_[r].err_pipe = err_pipe[0];
  TESSERA_ASSIGN_OR_RETURN(ranks_[r].pid, std::move(pid));
  return absl::OkStatus();
}

RankPool::Answers RankPool::Run(absl::string_view function,
                                absl::string_view args,
                                absl::Duration deadline) {
  if (!running_) {
    const absl::Time begin = absl::Now();
    absl::Status started = Start();
    ++AllStarts().count;
    AllStarts().time += absl::Now() - begin;
    if (!started.ok()) {
      KillAll();
      return Answers(options_.world_size, Annotate(started, "start of ranks"));
    }
  }
  for (Rank& rank : ranks_) rank.err.clear();
  Answers answers =
      Exchange(absl::StrCat(Frame(function), Frame(args)), function, deadline);
  if (std::any_of(ranks_.begin(), ranks_.end(),
                  [](const Rank& rank) { return rank.unusable; })) {
    KillAll();
  }
  return answers;
}

RankPool::Answers RankPool::Exchange(absl::string_view request,
                                     absl::string_view name,
                                     absl::Duration allowed) {
  const absl::Time deadline = absl::Now() + allowed;
  Answers answers(ranks_.size(), absl::UnknownError("not answered"));
  for (Rank& rank : ranks_) {
    rank.answered = false;
    // A rank that cannot be written to is dead; reading tells how.
    if (!request.empty()) SendAll(rank.socket, Frame(request));
  }
  auto all_answered = [&] {
    return std::all_of(ranks_.begin(), ranks_.end(),
                       [](const Rank& rank) { return rank.answered; });
  };
  while (!all_answered() && absl::Now() < deadline) Poll(&answers, deadline);
  const std::string late = NotAnswered();
  for (size_t r = 0; r < ranks_.size(); ++r) {
    ReadErr(static_cast<int>(r));
    if (ranks_[r].answered) continue;
    ranks_[r].unusable = true;
    answers[r] = absl::DeadlineExceededError(
        absl::StrCat(name, ": ", late, " not answered within ",
                     absl::FormatDuration(allowed), WithStderr(ranks_[r].err)));
  }
  return answers;
}

std::string RankPool::NotAnswered() const {
  std::vector<size_t> late;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    if (!ranks_[r].answered) late.push_back(r);
  }
  return absl::StrCat(late.size() == 1 ? "rank " : "ranks ",
                      absl::StrJoin(late, ", "),
                      late.size() == 1 ? " has" : " have");
}

void RankPool::Poll(Answers* answers, absl::Time deadline) {
  std::vector<pollfd> fds;
  for (const Rank& rank : ranks_) {
    fds.push_back({rank.answered ? -1 : rank.socket, POLLIN, 0});
    fds.push_back({rank.err_pipe, POLLIN, 0});
  }
  const int64_t left_ms = absl::ToInt64Milliseconds(deadline - absl::Now()) + 1;
  if (poll(fds.data(), fds.size(),
           static_cast<int>(std::clamp<int64_t>(left_ms, 0, 1 << 30))) <= 0) {
    return;
  }
  for (size_t r = 0; r < ranks_.size(); ++r) {
    // First stderr, so that it is there when the death is noticed.
    if (fds[2 * r + 1].revents != 0) ReadErr(static_cast<int>(r));
    if (fds[2 * r].revents != 0) ReadSocket(static_cast<int>(r), answers);
  }
}

void RankPool::ReadErr(int r) {
  Rank& rank = ranks_[r];
  pollfd fd = {rank.err_pipe, POLLIN, 0};
  while (rank.err_pipe >= 0 && poll(&fd, 1, 0) > 0) {
    if (!ReadSome(rank.err_pipe, &rank.err)) Close(&rank.err_pipe);
  }
  if (rank.err.size() > kMaxErrBytes) {
    rank.err.erase(0, rank.err.size() - kMaxErrBytes);
  }
}

void RankPool::ReadSocket(int r, Answers* answers) {
  Rank& rank = ranks_[r];
  if (!ReadSome(rank.socket, &rank.in)) return Died(r, answers);
  std::optional<std::string> answer = TakeFrame(&rank.in);
  if (!answer.has_value() || answer->size() < 2) return;
  rank.answered = true;
  rank.unusable = (*answer)[0] != 0;
  const auto code = static_cast<absl::StatusCode>((*answer)[1]);
  std::string text = answer->substr(2);
  if (code == absl::StatusCode::kOk) {
    (*answers)[r] = std::move(text);
  } else {
    (*answers)[r] = absl::Status(code, text);
  }
}

void RankPool::Died(int r, Answers* answers) {
  Rank& rank = ranks_[r];
  int wait_status = 0;
  // Its socket is closed, so it is ending; the wait is short.
  waitpid(rank.pid, &wait_status, 0);
  rank.pid = 0;
  ReadErr(r);
  rank.answered = rank.unusable = true;
  (*answers)[r] = absl::UnavailableError(absl::StrCat(
      "rank ", r, " ", DescribeExit(wait_status), WithStderr(rank.err)));
}

void RankPool::End() {
  if (!running_) return;
  // The end of the stream ends the ranks.
  for (Rank& rank : ranks_) Close(&rank.socket);
  const absl::Time deadline = absl::Now() + kEndTimeout;
  for (Rank& rank : ranks_) {
    // A rank that still writes to stderr must not block on a full pipe.
    while (rank.pid != 0 && absl::Now() < deadline) {
      std::string ignored;
      pollfd fd = {rank.err_pipe, POLLIN, 0};
      const int left_ms = static_cast<int>(
          absl::ToInt64Milliseconds(deadline - absl::Now()) + 1);
      if (poll(&fd, 1, left_ms) > 0 && ReadSome(rank.err_pipe, &ignored)) {
        continue;
      }
      if (waitpid(rank.pid, nullptr, WNOHANG) == rank.pid) rank.pid = 0;
    }
  }
  KillAll();
}

void RankPool::KillAll() {
  for (Rank& rank : ranks_) {
    if (rank.pid > 0) kill(rank.pid, SIGKILL);
  }
  for (Rank& rank : ranks_) {
    if (rank.pid > 0) waitpid(rank.pid, nullptr, 0);
    rank.pid = 0;
    Close(&rank.socket);
    Close(&rank.err_pipe);
    rank.unusable = false;
  }
  store_ = nullptr;
  running_ = false;
}

}  // namespace tessera
