#include "tests/failure/end_runs.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "comm/launch/launcher.h"
#include "comm/launch/subprocess.h"
#include "tests/support/fork_server.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace tessera {
namespace {

constexpr int kRanks = 2;
// Less than what any step to the end takes.
constexpr absl::Duration kHardlyAny = absl::Milliseconds(20);

std::string ReadAll(const std::string& path) {
  std::string text;
  char buffer[4096];
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  for (ssize_t got; fd >= 0 && (got = read(fd, buffer, sizeof(buffer))) > 0;) {
    text.append(buffer, static_cast<size_t>(got));
  }
  if (fd >= 0) close(fd);
  return text;
}

std::vector<std::string> NamesIn(const std::string& path) {
  std::vector<std::string> names;
  DIR* const dir = opendir(path.c_str());
  if (dir == nullptr) return names;
  while (const dirent* entry = readdir(dir)) {
    if (entry->d_name[0] != '.') names.push_back(entry->d_name);
  }
  closedir(dir);
  return names;
}

// What gdb says of it; it may not be installed, or not be allowed to look.
std::string GdbStacks(pid_t pid) {
  const std::string command =
      absl::StrCat("timeout 60 gdb -p ", pid,
                   " -batch -ex 'thread apply all bt' 2>&1 </dev/null");
  FILE* const pipe = popen(command.c_str(), "re");
  if (pipe == nullptr) return "";
  std::string text;
  char buffer[4096];
  while (const size_t got = fread(buffer, 1, sizeof(buffer), pipe)) {
    text.append(buffer, got);
  }
  pclose(pipe);
  return text;
}

std::vector<pid_t> ChildrenOf(pid_t pid) {
  std::vector<pid_t> children;
  const std::string tasks = absl::StrCat("/proc/", pid, "/task");
  for (const std::string& task : NamesIn(tasks)) {
    const std::string all =
        ReadAll(absl::StrCat(tasks, "/", task, "/children"));
    for (const auto child : absl::StrSplit(all, ' ', absl::SkipWhitespace())) {
      pid_t id = 0;
      if (absl::SimpleAtoi(child, &id)) children.push_back(id);
    }
  }
  return children;
}

// Of the threads of a process and of its children: how long they have run, or
// would have if a processor had been free. Except of those that only look now
// and then, whatever the others do.
absl::Duration WantedTime(pid_t pid) {
  int64_t wanted_ns = 0;
  const std::string tasks = absl::StrCat("/proc/", pid, "/task");
  for (const std::string& task : NamesIn(tasks)) {
    const std::string path = absl::StrCat(tasks, "/", task, "/");
    if (ReadAll(path + "comm") == "tessera-watch\n") continue;
    int64_t ran_ns = 0, waited_ns = 0;
    const std::vector<std::string> fields =
        absl::StrSplit(ReadAll(path + "schedstat"), ' ');
    if (fields.size() == 3 && absl::SimpleAtoi(fields[0], &ran_ns) &&
        absl::SimpleAtoi(fields[1], &waited_ns)) {
      wanted_ns += ran_ns + waited_ns;
    }
  }
  absl::Duration wanted = absl::Nanoseconds(wanted_ns);
  for (const pid_t child : ChildrenOf(pid)) wanted += WantedTime(child);
  return wanted;
}

void AddStacks(pid_t pid, std::string* text) {
  const std::string process = absl::StrCat("/proc/", pid);
  absl::StrAppend(text, "process ", pid, ": ",
                  ReadAll(absl::StrCat(process, "/stat")));
  for (const std::string& task : NamesIn(absl::StrCat(process, "/task"))) {
    const std::string path = absl::StrCat(process, "/task/", task, "/");
    absl::StrAppend(text, "  thread ", task, " ", ReadAll(path + "comm"),
                    "    wchan ", ReadAll(path + "wchan"), "\n    syscall ",
                    ReadAll(path + "syscall"), ReadAll(path + "stack"));
  }
  absl::StrAppend(text, GdbStacks(pid), "\n");
  for (const pid_t child : ChildrenOf(pid)) AddStacks(child, text);
}

}  // namespace

std::string NameOf(Ending ending) {
  switch (ending) {
    case Ending::kClosed:
      return "Close and Shutdown";
    case Ending::kDestroyed:
      return "no Close";
    case Ending::kWithoutShutdown:
      return "no Shutdown";
    case Ending::kByExit:
      return "exit with all alive";
  }
  return "";
}

EndRun::EndRun(Ending ending, bool by_launcher)
    : ending_(ending), by_launcher_(by_launcher) {
  by_launcher ? StartLauncher() : StartForks();
}

void EndRun::StartForks() {
  store_ = HostedStore::Start(kRanks).value();
  for (int r = 0; r < kRanks; ++r) {
    Environment env = LocalRankEnvironment(r, kRanks, store_->Environment());
    env.emplace_back(kEndingVariable, absl::StrCat(static_cast<int>(ending_)));
    int pipe[2];
    TESSERA_CHECK(pipe2(pipe, O_CLOEXEC) == 0);
    SelfExecOptions options;
    options.env = std::move(env);
    options.fds = {{pipe[1], STDERR_FILENO}};
    const pid_t pid = ForkSelf(options).value();
    close(pipe[1]);
    children_.push_back({pid, pipe[0]});
  }
}

void EndRun::StartLauncher() {
  int pipe[2];
  TESSERA_CHECK(pipe2(pipe, O_CLOEXEC) == 0);
  SelfExecOptions options;
  options.argv = {"program", absl::StrCat("--world=", kRanks)};
  options.env = {{kEndingVariable, absl::StrCat(static_cast<int>(ending_))}};
  options.fds = {{pipe[1], STDOUT_FILENO}, {pipe[1], STDERR_FILENO}};
  const pid_t pid = ForkSelf(options).value();
  close(pipe[1]);
  children_.push_back({pid, pipe[0]});
}

EndRun::~EndRun() {
  for (const Child& child : children_) {
    if (child.pid != 0) {
      kill(child.pid, SIGKILL);
      waitpid(child.pid, nullptr, 0);
    }
    close(child.output);
  }
}

bool EndRun::HasEnded() {
  bool all = true;
  for (Child& child : children_) {
    if (child.pid == 0) continue;
    if (waitpid(child.pid, &child.wait_status, WNOHANG) == child.pid) {
      child.pid = 0;
    } else {
      all = false;
    }
  }
  return all;
}

bool EndRun::Hangs(absl::Duration limit) {
  if (absl::Now() - looked_ < limit) return false;
  absl::Duration wanted;
  for (const Child& child : children_) {
    if (child.pid != 0) wanted += WantedTime(child.pid);
  }
  // Less: some thread has ended meanwhile.
  const bool hangs =
      wanted >= wanted_then_ && wanted - wanted_then_ < kHardlyAny;
  wanted_then_ = wanted;
  looked_ = absl::Now();
  return hangs;
}

std::string EndRun::Stacks() const {
  std::string text;
  for (const Child& child : children_) {
    if (child.pid != 0) AddStacks(child.pid, &text);
  }
  return text;
}

std::string EndRun::Fault() {
  std::string text;
  int results = 0;
  int ill = 0;
  for (const Child& child : children_) {
    const std::string output =
        ReadAll(absl::StrCat("/proc/self/fd/", child.output));
    for (const auto line : absl::StrSplit(output, '\n')) {
      results += absl::StrContains(line, "result ");
    }
    ill += child.wait_status != 0;
    absl::StrAppend(&text, DescribeExit(child.wait_status), ": ", output, "\n");
  }
  return ill == 0 && results == kRanks ? "" : text;
}

std::string EndRun::ToText() const {
  return absl::StrCat(NameOf(ending_),
                      by_launcher_ ? ", by a launcher" : ", by forks");
}

}  // namespace tessera
