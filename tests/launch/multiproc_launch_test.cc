// Init, as users meet it: this test program, run again as a program that calls
// Init (see kProgram), alone or under --world; with a launcher's variables:
// multiproc_rendezvous_test.cc.
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "comm/launch/cpus.h"
#include "comm/world/world.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/launch/multiproc_launch_test_util.h"
#include "tests/support/fork_server.h"
#include "tests/support/process.h"
#include "third_party/gtest/run_and_exit.h"
#include "torch/torch.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

// The variable says what happens to descriptors 0 to 2 before the program is
// executed, a letter for each: (c)losed, (r)ead only, (w)rite only, (p)ipe that
// nobody reads, or (-) unchanged.
constexpr char kStandard[] = "TESSERA_LAUNCH_TEST_STANDARD";

// ---- the program ----

// Says on stdout who it is, and lives on with all that its parent has open.
void SleepInChild(bool plain) {
  const auto child =
      plain ? fork()
            : static_cast<pid_t>(syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0));
  if (child != 0) return;
  const std::string line = absl::StrCat("child ", getpid(), "\n");
  if (write(STDOUT_FILENO, line.data(), line.size()) < 0) _exit(99);
  for (int fd : {0, 1, 2}) close(fd);  // the test waits for their end
  alarm(60);
  while (true) pause();
}

// That nothing but what was there, or /dev/null, has the first three numbers.
absl::Status CheckStandard() {
  for (int fd : {0, 1, 2}) {
    struct stat info;
    if (fstat(fd, &info) != 0 || S_ISSOCK(info.st_mode) ||
        S_ISREG(info.st_mode) || (info.st_mode & S_IFMT) == 0) {
      return absl::InternalError(absl::StrCat("descriptor ", fd));
    }
  }
  return absl::OkStatus();
}

absl::Status AfterInit(const World& world, const std::string& program, int argc,
                       char** argv) {
  if (program == "refuse") return absl::InvalidArgumentError("of all ranks");
  if (program == "notice") {
    raise(SIGUSR1);
    raise(SIGUSR1);
  }
  if (program == "standard") {
    TESSERA_RETURN_IF_ERROR(CheckStandard());
    for (int i = 0; i < 3; ++i) {
      std::printf("step %d\n", i);
      std::fprintf(stderr, "step %d\n", i);
      std::fflush(stdout);
    }
  }
  if (absl::StartsWith(program, "forked") ||
      absl::StartsWith(program, "cloned")) {
    SleepInChild(absl::StartsWith(program, "forked"));
    TESSERA_RETURN_IF_ERROR(world.communicator()->Barrier("all have"));
    if (absl::EndsWith(program, absl::StrCat(world.rank()))) raise(SIGKILL);
  }
  if (program == "kill1" && world.rank() == 1) {
    printf("last words\n");  // into a pipe, and not flushed
    raise(SIGKILL);
  }
  if (program == "fail1" && world.rank() == 1) _exit(5);
  at::Tensor t = torch::ones({1000});
  TESSERA_RETURN_IF_ERROR(
      world.communicator()->AllReduceSum(t, {"the sum"}).Wait());
  const std::string args = absl::StrJoin(argv + 1, argv + argc, ",");
  // One write each, so that lines do not mix.
  if (program == "standard") return absl::OkStatus();
  const std::string line =
      absl::StrCat("rank ", world.rank(), "/", world.world_size(), " local ",
                   world.local_rank(), "/", world.local_world_size(), " sum ",
                   t[0].item<float>(), " args [", args, "] threads ",
                   at::get_num_threads(), "\n");
  if (write(STDOUT_FILENO, line.data(), line.size()) < 0) _exit(99);
  return absl::OkStatus();
}

// Executes this program again, with descriptors as `how` says.
void Restart(const std::string& how, char** argv) {
  unsetenv(kStandard);
  int unread[2];
  if (pipe(unread) != 0) _exit(98);
  const int null[] = {open("/dev/null", O_RDONLY | O_CLOEXEC),
                      open("/dev/null", O_WRONLY | O_CLOEXEC)};
  for (int fd = 0; fd < 3; ++fd) {
    if (how[fd] == 'r') dup2(null[0], fd);
    if (how[fd] == 'w') dup2(null[1], fd);
    if (how[fd] == 'p') dup2(unread[1], fd);
    if (how[fd] == 'c') close(fd);
  }
  close(unread[0]);
  close(unread[1]);
  execv("/proc/self/exe", argv);
  _exit(97);
}

int RunProgram(const std::string& program, int argc, char** argv) {
  if (const char* const how = getenv(kStandard)) Restart(how, argv);
  // RANK is set only in a rank, not in the launcher.
  const char* const rank = getenv("RANK");
  if (program == "die1" && rank != nullptr && rank[0] == '1') _exit(3);
  if (program == "help1" && rank != nullptr && rank[0] == '1') _exit(0);
  if ((program == "wait" || program == "deaf") && rank != nullptr) {
    if (program == "deaf") signal(SIGTERM, SIG_IGN);
    if (write(STDOUT_FILENO, "here\n", 5) < 0) _exit(99);
    while (true) pause();
  }
  absl::StatusOr<const World*> world = Init(&argc, argv);
  const absl::Status status =
      world.ok() ? AfterInit(**world, program, argc, argv) : world.status();
  if (!status.ok()) {
    const std::string line = absl::StrCat(status.ToString(), "\n");
    if (write(STDERR_FILENO, line.data(), line.size()) < 0) _exit(99);
  }
  Shutdown();
  return status.ok() ? 0 : 1;
}

// ---- --world=N ----

TEST(WorldFlagTest, RunsTheRanks) {
  const Finished run = RunOne("plain", {"a", "--world=3", "--b=c"});
  EXPECT_EQ(run.code, 0) << run.err;
  for (int r = 0; r < 3; ++r) {
    EXPECT_THAT(run.out, HasSubstr(absl::StrCat("rank ", r, "/3 local ", r,
                                                "/3 sum 3 args [a,--b=c] ")));
  }
  EXPECT_EQ(run.err, "");
}

// Threads of one of `num_ranks` ranks of this host.
int ShareOf(int num_ranks) {
  return std::min(at::get_num_threads(),
                  ThreadsOf(std::vector<std::string>(num_ranks, AllowedCpus()),
                            0, CgroupCpus()));
}

TEST(WorldFlagTest, SharesTheCoresUnlessTold) {
  const int share = ShareOf(2);
  EXPECT_THAT(RunOne("plain", {"--world=2"}).out,
              HasSubstr(absl::StrCat("threads ", share, "\n")));
  const std::string other = share == 1 ? "2" : "1";
  EXPECT_THAT(RunOne("plain", {"--world=2"}, {{"OMP_NUM_THREADS", other}}).out,
              HasSubstr(absl::StrCat("threads ", other, "\n")));
}

TEST(WorldFlagTest, OneIsThisProcess) {
  const Finished run = RunOne("plain", {"--world=1", "x"});
  EXPECT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.out, HasSubstr("rank 0/1 local 0/1 sum 1 args [x]"));
  EXPECT_THAT(RunOne("plain", {}).out, HasSubstr("rank 0/1"));
}

TEST(WorldFlagTest, RefusesNonsense) {
  for (const char* flag : {"--world=0", "--world=abc", "--world", "--world="}) {
    const Finished run = RunOne("plain", {flag});
    EXPECT_EQ(run.code, 1);
    EXPECT_THAT(run.err, AllOf(HasSubstr("INVALID_ARGUMENT: --world: expected"),
                               Not(HasSubstr("\n\n"))));
  }
}

TEST(WorldFlagTest, ARankThatDiesAtStartUpEndsTheOthers) {
  const Finished run = RunOne("die1", {"--world=3"});
  EXPECT_EQ(run.code, 3);
  EXPECT_LT(run.took, absl::Seconds(9));
  EXPECT_THAT(run.err, HasSubstr("tessera: rank 1 ended (exit code 3)\n"));
  EXPECT_THAT(run.err,
              HasSubstr("rank 1 ended (exit code 3) before the job had "
                        "started\n"));
  EXPECT_THAT(run.err, HasSubstr("UNAVAILABLE"));
  EXPECT_EQ(run.out, "");
}

TEST(WorldFlagTest, ARankThatNeverCallsInitEndsTheOthers) {
  const Finished run = RunOne("help1", {"--world=2"});
  EXPECT_EQ(run.code, 1);
  EXPECT_LT(run.took, absl::Seconds(9));
  EXPECT_THAT(run.err, HasSubstr("rank 1 ended (exit code 0) before the job"));
}

TEST(WorldFlagTest, ARankThatIsKilledLaterEndsTheOthers) {
  const Finished run = RunOne("kill1", {"--world=3"});
  EXPECT_EQ(run.code, 128 + SIGKILL);
  EXPECT_LT(run.took, absl::Seconds(9));
  EXPECT_EQ(run.out, "last words\n");
  EXPECT_THAT(run.err,
              HasSubstr("tessera: rank 1 was ended by signal 9 (Killed)\n"));
  EXPECT_THAT(run.err, ContainsRegex("UNAVAILABLE: the sum( #[0-9]+)?: rank 1 "
                                     "has ended"));
}

// Its child has what tells the others whether it lives; or would have, and was
// made so that nobody hears of it but the launcher, who sees the rank end.
TEST(WorldFlagTest, ARankIsSeenToEndThoughItsChildLives) {
  for (const char* program : {"forked0", "forked1", "cloned1"}) {
    const Finished run = RunOne(program, {"--world=3"});
    EXPECT_EQ(run.code, 128 + SIGKILL);
    EXPECT_LT(run.took, absl::Seconds(9));  // when those left would be ended
    for (int r = 0; r < 3; ++r) {
      if (absl::EndsWith(program, absl::StrCat(r))) continue;
      EXPECT_THAT(run.err, ContainsRegex(absl::StrCat(
                               "UNAVAILABLE: the sum( #[0-9]+)?: rank ",
                               program[6] - '0', " has ended")))
          << program;
    }
    int children = 0;
    for (const absl::string_view line : absl::StrSplit(run.out, '\n')) {
      int child = 0;
      if (!absl::StartsWith(line, "child ") ||
          !absl::SimpleAtoi(line.substr(6), &child)) {
        continue;
      }
      ++children;
      EXPECT_EQ(kill(child, SIGKILL), 0);  // it has outlived its rank
    }
    EXPECT_EQ(children, 3);
  }
}

// Daemons, ssh and cron leave them in these states.
TEST(WorldFlagTest, StandardDescriptorsMayBeClosedOrOfAnotherKind) {
  for (const char* how : {"ccc", "-c-", "--c", "wrr", "-pp"}) {
    const Finished run = RunOne("standard", {"--world=2", "--prefix_output=on"},
                                {{kStandard, how}});
    EXPECT_EQ(run.code, 0) << how << ": " << run.err;
    if (how[1] == '-') EXPECT_THAT(run.out, HasSubstr("[1] step 2\n"));
    if (how[2] == '-') EXPECT_THAT(run.err, HasSubstr("[0] step 2\n"));
  }
  // Nobody between them and who started them, and no launcher at all.
  for (const char* how : {"ccc", "-pp"}) {
    const Env env = {{kStandard, how}};
    EXPECT_EQ(
        RunOne("standard", {"--world=2", "--prefix_output=off"}, env).code, 0)
        << how;
    EXPECT_EQ(RunOne("standard", {}, env).code, 0) << how;
  }
}

// Nobody is there who saves at it.
TEST(WorldFlagTest, SIGUSR1EndsNobody) {
  for (const char* world : {"--world=1", "--world=2"}) {
    const Finished run = RunOne("notice", {world});
    EXPECT_EQ(run.code, 0) << run.err;
    EXPECT_THAT(run.err, HasSubstr("SIGUSR1: no CheckpointManager is there"));
  }
}

TEST(WorldFlagTest, AnErrorOfAllRanksIsSaidOnce) {
  const Finished run = RunOne("refuse", {"--world=3"});
  EXPECT_EQ(run.code, 1);
  EXPECT_THAT(run.err,
              testing::StartsWith("[0-2] INVALID_ARGUMENT: of all ranks\n"
                                  "tessera: rank "));
  EXPECT_THAT(run.err, Not(HasSubstr("[1]")));
}

TEST(WorldFlagTest, TheFirstFailuresCodeCounts) {
  EXPECT_EQ(RunOne("fail1", {"--world=2"}).code, 5);
}

TEST(WorldFlagTest, TheRanksDieWithTheParent) {
  Process parent({"--world=3"}, Named("wait", {}));
  ASSERT_TRUE(parent.WaitForLines(3));
  kill(parent.pid(), SIGKILL);
  EXPECT_EQ(parent.Finish(absl::Seconds(20)).code, 128 + SIGKILL);
}

TEST(WorldFlagTest, SignalsReachTheRanks) {
  for (int sig : {SIGTERM, SIGINT}) {
    Process parent({"--world=2"}, Named("wait", {}));
    ASSERT_TRUE(parent.WaitForLines(2));
    kill(parent.pid(), sig);
    const Finished run = parent.Finish(absl::Seconds(20));
    EXPECT_EQ(run.code, 128 + sig);
    EXPECT_LT(run.took, absl::Seconds(15));
  }
}

// Ten seconds are the default.
TEST(WorldFlagTest, GraceIsWhatASignalLeaves) {
  Process parent({"--world=2", "--grace=0.1"}, Named("deaf", {}));
  ASSERT_TRUE(parent.WaitForLines(2));
  kill(parent.pid(), SIGTERM);
  const Finished run = parent.Finish(absl::Seconds(8));
  EXPECT_EQ(run.code, 128 + SIGKILL);
  EXPECT_THAT(
      run.err,
      HasSubstr("tessera: ranks 0, 1 have not ended within 100ms of "
                "SIGTERM (--grace), so they are killed\ntessera: rank "));
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  if (getenv(tessera::kProgram) == nullptr) {
    // Whoever runs this may ignore them.
    for (int sig : {SIGINT, SIGTERM, SIGHUP}) signal(sig, SIG_DFL);
  }
  // Ranks find their own number of threads.
  tessera::ServeForks(tessera::kProgram, &argc, &argv, /*threads=*/nullptr);
  if (const char* const program = getenv(tessera::kProgram)) {
    tessera::ExitAtOnce(tessera::RunProgram(program, argc, argv));
  }
  testing::InitGoogleTest(&argc, argv);
  tessera::RunTestsAndExit();
}
