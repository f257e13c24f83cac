// The launcher and its ranks as processes, without libtorch: this test program,
// run again as one that launches itself (see kProgram). What Init adds to it is
// in multiproc_launch_test.cc.
#include "comm/launch/launcher.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/process.h"
#include "third_party/gtest/run_and_exit.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

constexpr char kProgram[] = "TESSERA_LAUNCHER_TEST_PROGRAM";

// ---- the program ----

// The line is one write, so lines of ranks do not mix.
void Print(const std::string& line) {
  if (write(STDOUT_FILENO, line.data(), line.size()) < 0) _exit(99);
}

void WaitFor(int sig) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, sig);
  sigwait(&set, &sig);
}

[[noreturn]] void RunRank(const std::string& program, int rank) {
  if ((program == "unaware" || program == "stubborn") && rank == 0) _exit(6);
  if (program == "stubborn") signal(SIGTERM, SIG_IGN);
  if (program == "raise") {
    for (int sig : {SIGHUP, SIGINT, SIGQUIT}) raise(sig);
  }
  if (program == "ends" && rank == 0) signal(SIGTERM, [](int) { _exit(1); });
  if (program == "notice") {
    sigset_t notice;
    sigemptyset(&notice);
    sigaddset(&notice, SIGUSR1);
    sigprocmask(SIG_BLOCK, &notice, nullptr);
    Print("ready\n");
    WaitFor(SIGUSR1);
    Print("noticed\n");
    WaitFor(SIGUSR1);
    _exit(0);
  }
  const bool saver = program == "save" && rank == 0;
  if (saver) {
    sigset_t awaited;
    sigemptyset(&awaited);
    for (const int sig : {SIGTERM, SIGUSR1}) sigaddset(&awaited, sig);
    sigprocmask(SIG_BLOCK, &awaited, nullptr);
  }
  Print(absl::StrCat(rank, " ", getpid(), "\n"));
  if (saver) {
    WaitFor(SIGTERM);
    Print("saving\n");
    for (const char* line : {"still saving\n", "saved\n"}) {
      WaitFor(SIGUSR1);  // from the test: go on
      Print(line);
    }
    _exit(0);
  }
  while (true) pause();
}

int RunProgram(const std::string& program, int argc, char** argv) {
  if (IsLaunchedRank()) RunRank(program, atoi(getenv("RANK")));
  LaunchOptions options;
  options.world_size = 3;
  options.argv = {argv, argv + argc};
  if (program == "unaware" || program == "stubborn") {
    options.end_grace = options.term_grace = absl::Milliseconds(200);
  }
  if (program == "save") {
    options.end_grace = options.term_grace = absl::ZeroDuration();
    options.signal_grace = absl::InfiniteDuration();
    options.on_end = [](int, bool, const std::string&) { Print("an end\n"); };
  }
  return LaunchAndWait(options).value_or(98);
}

// ---- running it ----

Env Named(const std::string& program) { return {{kProgram, program}}; }

// Returns the process ids by rank, from the first words of each.
std::vector<pid_t> RankPids(const Process& launcher) {
  std::vector<pid_t> pids(3, 0);
  for (absl::string_view line : absl::StrSplit(launcher.out(), '\n')) {
    const std::pair<std::string, std::string> words = absl::StrSplit(line, ' ');
    int rank = 0;
    int pid = 0;
    if (absl::SimpleAtoi(words.first, &rank) &&
        absl::SimpleAtoi(words.second, &pid)) {
      pids.at(rank) = pid;
    }
  }
  return pids;
}

// Dead and not yet waited for.
bool WaitForZombie(pid_t pid) {
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  while (absl::Now() < deadline) {
    std::string stat;
    std::getline(std::ifstream(absl::StrCat("/proc/", pid, "/stat")), stat);
    const size_t name_end = stat.rfind(')');
    if (name_end == std::string::npos) return false;
    if (stat.substr(name_end, 3) == ") Z") return true;
    absl::SleepFor(absl::Milliseconds(1));
  }
  return false;
}

// Ignores signals as nohup and a script's background jobs do; children inherit
// it.
class Ignoring {
 public:
  explicit Ignoring(std::initializer_list<int> signals) {
    for (int sig : signals) before_.emplace_back(sig, signal(sig, SIG_IGN));
  }
  ~Ignoring() {
    for (const auto& [sig, handler] : before_) signal(sig, handler);
  }

 private:
  std::vector<std::pair<int, void (*)(int)>> before_;
};

TEST(LauncherTest, StubbornRanksAreEnded) {
  for (const char* program : {"unaware", "stubborn"}) {
    const Finished run = Process({}, Named(program)).Finish(absl::Seconds(30));
    EXPECT_EQ(run.code, 6);
    EXPECT_THAT(run.err, HasSubstr("rank 0 ended (exit code 6)"));
  }
}

TEST(LauncherTest, IgnoredSignalsStayIgnored) {
  const Ignoring ignoring({SIGHUP, SIGINT, SIGQUIT});
  Process launcher({}, Named("raise"));
  ASSERT_TRUE(launcher.WaitForLines(3));  // the ranks have outlived them
  for (int sig : {SIGHUP, SIGINT, SIGQUIT}) kill(launcher.pid(), sig);
  kill(launcher.pid(), SIGTERM);
  EXPECT_EQ(launcher.Finish(absl::Seconds(20)).code, 128 + SIGTERM);
}

// The signal is sent twice, so it has ended no process the first time.
TEST(LauncherTest, SIGUSR1IsPassedOnAndEndsNobody) {
  Process launcher({}, Named("notice"));
  for (int seen : {3, 6}) {
    ASSERT_TRUE(launcher.WaitForLines(seen));
    kill(launcher.pid(), SIGUSR1);
  }
  EXPECT_EQ(launcher.Finish(absl::Seconds(20)).code, 0);
}

// No patience with failures, and ranks 1 and 2 end by the signal: rank 0 still
// has the time that signals give. It answers twice: what the launcher sends
// after an end comes before the second.
TEST(LauncherTest, ASignalLeavesTimeToSave) {
  Process launcher({}, Named("save"));
  ASSERT_TRUE(launcher.WaitForLines(3));
  kill(launcher.pid(), SIGTERM);
  ASSERT_TRUE(launcher.WaitForLines(3 + 1 + 2));  // "saving", two ends
  kill(launcher.pid(), SIGUSR1);
  ASSERT_TRUE(launcher.WaitForLines(3 + 1 + 2 + 1));
  kill(launcher.pid(), SIGUSR1);
  const Finished run = launcher.Finish(absl::Seconds(20));
  EXPECT_THAT(run.out, HasSubstr("saved\n"));
  EXPECT_EQ(run.code, 128 + SIGTERM);
}

// The launcher is stopped while rank 0 ends with code 1, as one that has lost
// rank 1 does, and rank 1 by SIGKILL.
TEST(LauncherTest, OfSeveralEndsASignalIsTheCause) {
  Process launcher({}, Named("ends"));
  ASSERT_TRUE(launcher.WaitForLines(3));
  const std::vector<pid_t> ranks = RankPids(launcher);
  ASSERT_THAT(ranks, testing::Each(testing::Gt(0)));
  kill(launcher.pid(), SIGSTOP);
  ASSERT_EQ(waitpid(launcher.pid(), nullptr, WUNTRACED), launcher.pid());
  kill(ranks[0], SIGTERM);
  kill(ranks[1], SIGKILL);
  ASSERT_TRUE(WaitForZombie(ranks[0]) && WaitForZombie(ranks[1]));
  kill(ranks[2], SIGTERM);
  kill(launcher.pid(), SIGCONT);
  const Finished run = launcher.Finish(absl::Seconds(20));
  EXPECT_EQ(run.code, 128 + SIGKILL);
  EXPECT_EQ(run.err, "tessera: rank 1 was ended by signal 9 (Killed)\n");
}

// They can neither end nor answer a signal.
TEST(LauncherTest, StoppedRanksAreNotGivenTimeToEnd) {
  Process launcher({}, Named("wait"));
  ASSERT_TRUE(launcher.WaitForLines(3));
  const std::vector<pid_t> pids = RankPids(launcher);
  for (int r : {1, 2}) kill(pids[r], SIGSTOP);
  const absl::Time killed = absl::Now();
  kill(pids[0], SIGKILL);
  EXPECT_EQ(launcher.Finish().code, 128 + SIGKILL);
  EXPECT_LT(absl::Now() - killed, LaunchOptions().end_grace);
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  if (const char* const program = getenv(tessera::kProgram)) {
    return tessera::RunProgram(program, argc, argv);
  }
  // Whoever runs this may ignore them.
  for (int sig : {SIGINT, SIGTERM, SIGHUP}) signal(sig, SIG_DFL);
  testing::InitGoogleTest(&argc, argv);
  tessera::RunTestsAndExit();
}
