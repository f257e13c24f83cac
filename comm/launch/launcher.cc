#include "comm/launch/launcher.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/env.h"
#include "base/status.h"
#include "base/system/system_limits.h"
#include "base/thread/deadline.h"
#include "comm/launch/output_relay.h"
#include "comm/launch/subprocess.h"

namespace tessera {
namespace {

constexpr char kMark[] = "TESSERA_LAUNCHED_BY";    // the parent's process id
constexpr char kNews[] = "TESSERA_LAUNCHER_NEWS";  // a descriptor
constexpr int kPassedOn[] = {SIGINT, SIGTERM, SIGHUP};
// Passed on, too, and no reason to end: what Slurm sends before a job's time is
// over (--signal), and a program saves its state at.
constexpr int kNotice = SIGUSR1;

int g_signal_pipe[2] = {-1, -1};
std::atomic<int> g_news{-1};  // of a launched rank

// One byte, the signal's number, for the loop that waits at the other end.
void NoteSignal(int sig) {
  const int saved = errno;
  const unsigned char byte = static_cast<unsigned char>(sig);
  // A full pipe is no harm: the loop is awake and looks at everything.
  if (write(g_signal_pipe[1], &byte, 1) < 0) errno = 0;
  errno = saved;
}

absl::Status CatchSignals() {
  if (pipe2(g_signal_pipe, O_CLOEXEC | O_NONBLOCK) != 0) {
    return absl::UnavailableError(absl::StrCat(
        "no pipe for signals: ", strerror(errno), DescriptorLimit(errno)));
  }
  struct sigaction act;
  memset(&act, 0, sizeof(act));
  act.sa_handler = NoteSignal;
  act.sa_flags = SA_RESTART;
  sigaction(SIGCHLD, &act, nullptr);
  for (int sig : kPassedOn) {
    if (!IsIgnored(sig)) sigaction(sig, &act, nullptr);
  }
  if (!IsIgnored(kNotice)) sigaction(kNotice, &act, nullptr);
  return absl::OkStatus();
}

const char* NameOf(int passed_on) {
  if (passed_on == SIGTERM) return "SIGTERM";
  return passed_on == SIGINT ? "SIGINT" : "SIGHUP";
}

// From here on signals do what they do by default: all ranks have ended, and
// only whoever reads their words is waited for.
void LetSignalsGo() {
  for (int sig : kPassedOn) {
    if (!IsIgnored(sig)) signal(sig, SIG_DFL);
  }
  if (!IsIgnored(kNotice)) signal(kNotice, SIG_DFL);
}

class Supervisor {
 public:
  // Both outlive this.
  Supervisor(const LaunchOptions& options, OutputRelay* relay)
      : options_(options),
        relay_(*relay),
        pids_(options.world_size, 0),
        news_(options.world_size, -1),
        stopped_(options.world_size) {}
  ~Supervisor() {
    for (int fd : news_) {
      if (fd >= 0) close(fd);
    }
  }

  absl::Status Start();
  int Wait();
  // Ends what has been started, at once.
  void KillAll();

 private:
  // Stopped processes can neither end nor answer a signal.
  bool AllAliveAreStopped() const {
    for (size_t r = 0; r < pids_.size(); ++r) {
      if (pids_[r] != 0 && !stopped_[r]) return false;
    }
    return AnyAlive();
  }
  bool AnyAlive() const {
    return std::any_of(pids_.begin(), pids_.end(),
                       [](pid_t pid) { return pid != 0; });
  }
  void Signal(int sig) {
    for (pid_t pid : pids_) {
      if (pid != 0) kill(pid, sig);
    }
  }
  // Gives rank `rank` an end of news_.
  void AddNews(int rank, SelfExecOptions* child, int* its_end);
  void Tell(int ended_rank);
  void WaitForSignals();
  void Reap();
  void Ended(int rank, int wait_status);
  // SIGTERM, then SIGKILL, when their times have come.
  void Press();
  // Names the ranks that --grace was too short for.
  std::string LateLine() const;

  const LaunchOptions& options_;
  OutputRelay& relay_;
  std::vector<pid_t> pids_;    // by rank; 0 once reaped
  std::vector<int> news_;      // by rank, our end; -1 if there is none
  std::vector<bool> stopped_;  // by rank (SIGSTOP, a terminal)
  std::optional<int> first_failure_;
  std::optional<int> signal_;  // the first that was passed on
  std::string late_line_;      // to be written at the next end
  Deadline term_at_ = Deadline::Never();
  Deadline kill_at_ = Deadline::Never();
  Deadline grace_at_ = Deadline::Never();  // the end of --grace
};

absl::Status Supervisor::Start() {
  for (int r = 0; r < options_.world_size; ++r) {
    SelfExecOptions child;
    child.argv = options_.argv;
    child.env = LocalRankEnvironment(r, options_.world_size, options_.meeting);
    child.fds = relay_.ChildFds(r);
    int its_end = -1;
    AddNews(r, &child, &its_end);
    const absl::StatusOr<pid_t> pid = SpawnSelf(child);
    if (its_end >= 0) close(its_end);
    TESSERA_RETURN_IF_ERROR(pid.status());
    pids_[r] = *pid;
    relay_.Started(r);
  }
  return absl::OkStatus();
}

// Where the system has no more descriptors a rank goes without.
void Supervisor::AddNews(int rank, SelfExecOptions* child, int* its_end) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) return;
  news_[rank] = ends[0];
  *its_end = ends[1];
  child->fds.emplace_back(ends[1], ends[1]);
  child->env.emplace_back(kNews, absl::StrCat(ends[1]));
}

void Supervisor::Tell(int ended_rank) {
  const int32_t number = ended_rank;
  for (size_t r = 0; r < pids_.size(); ++r) {
    if (pids_[r] == 0 || news_[r] < 0) continue;
    (void)send(news_[r], &number, sizeof(number), MSG_NOSIGNAL | MSG_DONTWAIT);
  }
}

void Supervisor::KillAll() {
  Signal(SIGKILL);
  for (pid_t& pid : pids_) {
    if (pid != 0) waitpid(pid, nullptr, 0);
    pid = 0;
  }
}

int Supervisor::Wait() {
  while (AnyAlive()) {
    WaitForSignals();
    Reap();
    Press();
  }
  return first_failure_.value_or(0);
}

void Supervisor::WaitForSignals() {
  const absl::Duration left = std::min(term_at_, kill_at_).Left();
  const int64_t left_ms = absl::ToInt64Milliseconds(std::clamp(
      left + absl::Milliseconds(1), absl::ZeroDuration(), absl::Hours(1)));
  pollfd fd = {g_signal_pipe[0], POLLIN, 0};
  poll(&fd, 1, static_cast<int>(left_ms));
  unsigned char sig = 0;
  while (read(g_signal_pipe[0], &sig, 1) == 1) {
    if (sig == SIGCHLD) continue;
    Signal(sig);
    if (sig == kNotice) continue;
    if (!signal_.has_value()) {
      signal_ = sig;
      grace_at_ = Deadline::After(options_.signal_grace);
    }
    term_at_ = Deadline::Never();
    kill_at_ = std::min(kill_at_, grace_at_);
  }
}

// The order of several ends is not known. A rank that ends with an exit code
// may do so because another was killed; the other way round is rare.
void Supervisor::Reap() {
  std::vector<std::pair<int, int>> ended;  // rank, status
  for (int r = 0; r < options_.world_size; ++r) {
    int wait_status = 0;
    // All that is to be told: two changes may come with one signal.
    while (pids_[r] != 0 && waitpid(pids_[r], &wait_status,
                                    WNOHANG | WUNTRACED | WCONTINUED) > 0) {
      stopped_[r] = WIFSTOPPED(wait_status);
      if (stopped_[r] || WIFCONTINUED(wait_status)) continue;
      pids_[r] = 0;
      ended.emplace_back(r, wait_status);
    }
  }
  std::stable_partition(ended.begin(), ended.end(), [](const auto& rank) {
    return WIFSIGNALED(rank.second);
  });
  for (const auto& [rank, wait_status] : ended) Ended(rank, wait_status);
}

void Supervisor::Ended(int rank, int wait_status) {
  const int code = ShellExitCode(wait_status);
  const std::string how = DescribeExit(wait_status);
  std::string line;
  if (code != 0 && !first_failure_.has_value()) {
    first_failure_ = code;
    if (!signal_.has_value()) term_at_ = Deadline::After(options_.end_grace);
    line = absl::StrCat("tessera: rank ", rank, " ", how, "\n");
  }
  if (!late_line_.empty()) line.insert(0, std::exchange(late_line_, ""));
  if (code != 0) Tell(rank);
  relay_.Ended(rank, std::move(line));
  if (options_.on_end) options_.on_end(rank, code == 0, how);
}

std::string Supervisor::LateLine() const {
  std::vector<size_t> late;
  for (size_t r = 0; r < pids_.size(); ++r) {
    if (pids_[r] != 0) late.push_back(r);
  }
  const bool one = late.size() == 1;
  return absl::StrCat(
      "tessera: ", one ? "rank " : "ranks ", absl::StrJoin(late, ", "),
      one ? " has" : " have", " not ended within ",
      absl::FormatDuration(options_.signal_grace), " of ", NameOf(*signal_),
      " (--grace), so ", one ? "it is" : "they are", " killed\n");
}

void Supervisor::Press() {
  if (kill_at_.HasPassed() || (first_failure_.has_value() &&
                               !signal_.has_value() && AllAliveAreStopped())) {
    if (grace_at_.HasPassed() && AnyAlive()) late_line_ = LateLine();
    Signal(SIGKILL);
    kill_at_ = term_at_ = Deadline::Never();
  } else if (term_at_.HasPassed()) {
    Signal(SIGTERM);
    term_at_ = Deadline::Never();
    kill_at_ = std::min(kill_at_, Deadline::After(options_.term_grace));
  }
}

}  // namespace

absl::StatusOr<int> LaunchAndWait(const LaunchOptions& options) {
  TESSERA_RETURN_IF_ERROR(CatchSignals());
  OutputRelay::Options streams;
  streams.num_ranks = options.world_size;
  streams.out = options.prefix_output == PrefixOutput::kOn;
  streams.err = options.prefix_output != PrefixOutput::kOff;
  TESSERA_ASSIGN_OR_RETURN(std::unique_ptr<OutputRelay> relay,
                           OutputRelay::Start(streams));
  Supervisor supervisor(options, relay.get());
  absl::Status started = supervisor.Start();
  if (!started.ok()) {
    supervisor.KillAll();
    return started;
  }
  const int code = supervisor.Wait();
  LetSignalsGo();
  relay->Finish();
  return code;
}

std::vector<std::pair<std::string, std::string>> LocalRankEnvironment(
    int rank, int world_size,
    std::vector<std::pair<std::string, std::string>> meeting) {
  std::vector<std::pair<std::string, std::string>> env = std::move(meeting);
  env.insert(env.end(), {
                            {"RANK", absl::StrCat(rank)},
                            {"WORLD_SIZE", absl::StrCat(world_size)},
                            {"LOCAL_RANK", absl::StrCat(rank)},
                            {"LOCAL_WORLD_SIZE", absl::StrCat(world_size)},
                            {kMark, absl::StrCat(getpid())},
                        });
  return env;
}

bool IsLaunchedRank() {
  static const bool launched = [] {
    const std::optional<std::string> parent = EnvString(kMark);
    const std::optional<std::string> news = EnvString(kNews);
    unsetenv(kMark);
    unsetenv(kNews);
    if (!parent.has_value() || *parent != absl::StrCat(getppid())) return false;
    int fd = -1;
    // It has come through exec, and is to go no further.
    if (absl::SimpleAtoi(news.value_or(""), &fd) &&
        fcntl(fd, F_SETFD, FD_CLOEXEC) == 0) {
      g_news = fd;
    }
    return true;
  }();
  return launched;
}

int TakeLauncherNews() { return g_news.exchange(-1); }

}  // namespace tessera
