#include "tests/launch/startup_run.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "comm/launch/subprocess.h"
#include "tests/support/fork_server.h"

namespace tessera {
namespace {

// Readable once the process has ended, whose child it may be.
int OpenPid(pid_t pid) {
  return static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
}

// "[3] text" as OutputRelay writes it. Takes the prefix.
int RankOfLine(absl::string_view* line) {
  const size_t end = line->find("] ");
  int rank = -1;
  if (!absl::ConsumePrefix(line, "[") || end == absl::string_view::npos ||
      !absl::SimpleAtoi(line->substr(0, end - 1), &rank)) {
    return -1;
  }
  line->remove_prefix(end + 1);
  return rank;
}

}  // namespace

namespace {

bool IsLog(absl::string_view line) {
  return absl::StartsWith(line, "I ") || absl::StartsWith(line, "W ") ||
         absl::StartsWith(line, "[");
}

}  // namespace

std::string StartedRank::LastLine() const {
  std::string last;
  for (const absl::string_view line : absl::StrSplit(words, '\n')) {
    if (!line.empty() && !IsLog(line)) last = std::string(line);
  }
  return last;
}

StartupRun::~StartupRun() {
  for (const StartedRank& rank : ranks_) {
    if (rank.pid_fd < 0) continue;
    kill(rank.pid, SIGKILL);
    close(rank.pid_fd);
  }
  for (const pid_t pid : children_) {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
  for (const Stream& stream : streams_) {
    if (stream.fd >= 0) close(stream.fd);
  }
}

void StartupRun::Launch(const std::string& args) {
  int pipe[2];
  TESSERA_CHECK(pipe2(pipe, O_CLOEXEC) == 0);
  SelfExecOptions options;
  options.argv = {"program", absl::StrCat("--world=", ranks_.size()), args};
  options.env = {{kRankVariable, "launched"}, {"TESSERA_VERBOSE", "comm=1"}};
  options.fds = {{pipe[1], STDERR_FILENO}, {pipe[1], STDOUT_FILENO}};
  children_.push_back(ForkSelf(options).value());
  close(pipe[1]);
  streams_.push_back({pipe[0], -1, ""});
}

void StartupRun::StartRank(
    int rank, const std::string& args,
    std::vector<std::pair<std::string, std::string>> env) {
  int pipe[2];
  TESSERA_CHECK(pipe2(pipe, O_CLOEXEC) == 0);
  env.emplace_back(kRankVariable, absl::StrCat(rank));
  env.emplace_back(
      kArgsVariable,
      absl::StrCat(args, " --rank=", rank, " --world_size=", ranks_.size()));
  env.emplace_back("TESSERA_VERBOSE", "comm=1");
  SelfExecOptions options;
  options.env = std::move(env);
  options.fds = {{pipe[1], STDERR_FILENO}};
  const pid_t pid = ForkSelf(options).value();
  close(pipe[1]);
  children_.push_back(pid);
  streams_.push_back({pipe[0], rank, ""});
  ranks_[rank].pid = pid;
  ranks_[rank].pid_fd = OpenPid(pid);
}

bool StartupRun::WaitUntilSays(int r, const std::string& text,
                               absl::Time deadline) {
  while (!ranks_[r].Says(text) && ranks_[r].ended == absl::InfiniteFuture()) {
    if (absl::Now() >= deadline) return false;
    Read(deadline);
  }
  return true;
}

bool StartupRun::WaitUntilEnded(int except, absl::Time deadline) {
  const auto all_ended = [&] {
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (ranks_[r].ended == absl::InfiniteFuture() &&
          static_cast<int>(r) != except) {
        return false;
      }
    }
    return true;
  };
  while (!all_ended()) {
    if (absl::Now() >= deadline) return false;
    Read(deadline);
  }
  // This reads the processes' last output.
  WaitUntil(absl::Now() + absl::Milliseconds(50));
  return true;
}

void StartupRun::WaitUntil(absl::Time deadline) {
  while (absl::Now() < deadline) Read(deadline);
}

void StartupRun::Read(absl::Time deadline) {
  std::vector<pollfd> fds;  // poll passes over those that are -1
  for (const Stream& stream : streams_) fds.push_back({stream.fd, POLLIN, 0});
  for (const StartedRank& rank : ranks_) {
    fds.push_back({rank.pid_fd, POLLIN, 0});
  }
  const int64_t left = absl::ToInt64Milliseconds(deadline - absl::Now()) + 1;
  if (poll(fds.data(), fds.size(),
           static_cast<int>(std::clamp<int64_t>(left, 1, 1000))) <= 0) {
    return;
  }
  for (size_t i = 0; i < streams_.size(); ++i) {
    if (fds[i].revents == 0) continue;
    char buffer[4096];
    const ssize_t got = read(streams_[i].fd, buffer, sizeof(buffer));
    if (got <= 0) {
      close(streams_[i].fd);
      streams_[i].fd = -1;
      continue;
    }
    for (const char c : absl::string_view(buffer, got)) {
      streams_[i].line.push_back(c);
      if (c != '\n') continue;
      Take(&streams_[i], streams_[i].line);
      streams_[i].line.clear();
    }
  }
  for (size_t r = 0; r < ranks_.size(); ++r) {
    if (fds[streams_.size() + r].revents == 0) continue;
    close(ranks_[r].pid_fd);
    ranks_[r].pid_fd = -1;
    ranks_[r].ended = absl::Now();
  }
}

void StartupRun::Take(Stream* stream, const std::string& line) {
  absl::string_view text = line;
  const int r = stream->rank >= 0 ? stream->rank : RankOfLine(&text);
  if (r < 0) return;  // the launcher's own
  StartedRank& rank = ranks_[r];
  absl::StrAppend(&rank.words, text);
  if (!IsLog(text)) rank.told = absl::Now();
  if (!absl::ConsumePrefix(&text, kReadyLine)) return;
  rank.ready = absl::Now();
  if (rank.pid != 0) return;
  text = absl::StripSuffix(text, "\n");
  TESSERA_CHECK(absl::SimpleAtoi(text, &rank.pid)) << line;
  rank.pid_fd = OpenPid(rank.pid);
  if (rank.pid_fd < 0) rank.ended = rank.ready;
}

}  // namespace tessera
