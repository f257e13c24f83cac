// Ranks started as Open MPI, MPICH, Slurm and --world start them: by their
// variables, here without them. And what becomes of what ranks write.
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "comm/launch/cpus.h"
#include "comm/world/world.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/fork_server.h"
#include "tests/support/process.h"
#include "third_party/gtest/run_and_exit.h"
#include "torch/torch.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kProgram[] = "TESSERA_LAUNCHERS_TEST_PROGRAM";
constexpr int kLines = 200;

// ---- the programs ----

void Write(int fd, const std::string& text) {
  if (write(fd, text.data(), text.size()) < 0) _exit(99);
}

// Returns when nobody has any of a pipe left to read.
void WaitUntilRead(int fd) {
  int bytes = 1;
  while (ioctl(fd, FIONREAD, &bytes) == 0 && bytes > 0) sched_yield();
}

// Lines in halves, from all ranks at once. The first one's are read apart.
void Shout(int rank) {
  for (int i = 0; i < kLines; ++i) {
    for (int fd : {STDOUT_FILENO, STDERR_FILENO}) {
      Write(fd, absl::StrCat("line ", i, " of "));
      if (i == 0) WaitUntilRead(fd);
      Write(fd, absl::StrCat(rank, " ends\n"));
    }
  }
  Write(STDERR_FILENO, "a bar\rits end");
}

int RunProgram(const std::string& program, int argc, char** argv) {
  absl::StatusOr<const World*> world = Init(&argc, argv);
  if (!world.ok()) {
    Write(STDERR_FILENO, absl::StrCat(world.status().ToString(), "\n"));
    return 1;
  }
  at::Tensor t = torch::ones({10});
  const absl::Status status =
      (*world)->communicator()->AllReduceSum(t, {"the sum"}).Wait();
  const int rank = (*world)->rank();
  if (program == "shout") {
    Shout(rank);
  } else if (program == "last words" && rank == 1) {
    Write(STDERR_FILENO, "something is wrong\nvery");
    signal(SIGSEGV, SIG_DFL);  // sanitizers set their own
    raise(SIGSEGV);
  } else {
    Write(
        STDOUT_FILENO,
        absl::StrCat("rank ", rank, "/", (*world)->world_size(), " local ",
                     (*world)->local_rank(), "/", (*world)->local_world_size(),
                     " sum ", t[0].item<float>(), " threads ",
                     at::get_num_threads(), "\n"));
  }
  Shutdown();
  return status.ok() ? 0 : 1;
}

Finished RunOne(const std::string& program,
                const std::vector<std::string>& args, Env env = {},
                bool by_exec = false) {
  env.emplace_back(kProgram, program);
  return Process(args, env, by_exec).Finish();
}

// ---- launchers ----

// `ranks` ranks on this host.
void ExpectRanks(int ranks, const std::function<Env(int)>& env_of) {
  std::vector<std::unique_ptr<Process>> processes;
  for (int r = 0; r < ranks; ++r) {
    Env env = env_of(r);
    env.emplace_back(kProgram, "plain");
    processes.push_back(std::make_unique<Process>(
        std::vector<std::string>{"--startup_timeout=30"}, env));
  }
  const int threads =
      std::min(at::get_num_threads(),
               ThreadsOf(std::vector<std::string>(ranks, AllowedCpus()), 0,
                         CgroupCpus()));
  for (int r = 0; r < ranks; ++r) {
    const Finished run = processes[r]->Finish();
    EXPECT_EQ(run.code, 0) << run.err;
    EXPECT_EQ(run.err, "");
    EXPECT_EQ(run.out,
              absl::StrCat("rank ", r, "/", ranks, " local ", r, "/", ranks,
                           " sum ", ranks, " threads ", threads, "\n"));
  }
}

// Names a job that no other run of this test has.
std::string JobId() { return absl::StrCat(getpid()); }

TEST(LauncherTest, OpenMpi) {
  ExpectRanks(3, [](int r) -> Env {
    return {{"OMPI_COMM_WORLD_RANK", absl::StrCat(r)},
            {"OMPI_COMM_WORLD_SIZE", "3"},
            {"OMPI_COMM_WORLD_LOCAL_RANK", absl::StrCat(r)},
            {"OMPI_COMM_WORLD_LOCAL_SIZE", "3"},
            {"PMIX_NAMESPACE", JobId()}};
  });
}

TEST(LauncherTest, Mpich) {
  const std::string port = absl::StrCat(FreePort());
  ExpectRanks(3, [&](int r) -> Env {
    return {{"PMI_RANK", absl::StrCat(r)},
            {"PMI_SIZE", "3"},
            {"MPI_LOCALRANKID", absl::StrCat(r)},
            {"MPI_LOCALNRANKS", "3"},
            {"MASTER_PORT", port}};
  });
}

Env Slurm(int rank, int ranks) {
  return {{"SLURM_PROCID", absl::StrCat(rank)},
          {"SLURM_NTASKS", absl::StrCat(ranks)},
          {"SLURM_LOCALID", absl::StrCat(rank)},
          {"SLURM_NODEID", "0"},
          {"SLURM_STEP_TASKS_PER_NODE", absl::StrCat(ranks)},
          {"SLURM_STEP_NODELIST", "localhost"},
          {"SLURM_JOB_ID", JobId()},
          {"SLURM_STEP_ID", "0"}};
}

TEST(LauncherTest, Slurm) {
  ExpectRanks(3, [](int r) { return Slurm(r, 3); });
}

TEST(LauncherTest, WorldFlagInASlurmStepOfOneTask) {
  const Finished run = RunOne("plain", {"--world=2"}, Slurm(0, 1));
  EXPECT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.out, AllOf(HasSubstr("rank 0/2"), HasSubstr("rank 1/2")));
}

TEST(LauncherTest, WorldFlagInTheShellOfSalloc) {
  const Env shell = {{"SLURM_NTASKS", "4"},
                     {"SLURM_JOB_ID", "7"},
                     {"SLURM_JOB_NODELIST", "node[1-4]"}};
  EXPECT_THAT(RunOne("plain", {"--world=2"}, shell).out, HasSubstr("rank 1/2"));
  EXPECT_THAT(RunOne("plain", {}, shell).out, HasSubstr("rank 0/1"));
}

TEST(LauncherTest, NamesTheVariableThatDoesNotFit) {
  EXPECT_EQ(RunOne("plain", {}, {{"PMI_RANK", "2"}, {"PMI_SIZE", "2"}}).err,
            "INVALID_ARGUMENT: PMI_RANK is 2, expected 0 to 1 (the world size "
            "is 2)\n");
}

TEST(LauncherTest, NamesTheHostThatIsNotKnown) {
  for (const char* rank : {"--rank=0", "--rank=1"}) {
    const Finished run =
        RunOne("plain", {"--rendezvous=tcp://no-such-host.invalid:29500", rank,
                         "--world_size=2", "--startup_timeout=2"});
    EXPECT_EQ(run.code, 1);
    EXPECT_THAT(run.err,
                HasSubstr("29500: this host does not know "
                          "'no-such-host.invalid', or has no route to it; give "
                          "rank 0's host as MASTER_ADDR"));
  }
}

TEST(LauncherTest, ThreadsFollowTheProcessorsOfARank) {
  // mpirun binds it to one processor, for a world of one.
  const std::vector<int> cpus = ParseCpuList(AllowedCpus());
  if (cpus.size() < 2) GTEST_SKIP() << "one processor only";
  cpu_set_t before, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  CPU_ZERO(&one);
  CPU_SET(cpus[0], &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  const Finished run = RunOne("plain", {}, {{"TESSERA_VERBOSE", "comm=1"}},
                              /*by_exec=*/true);
  sched_setaffinity(0, sizeof(before), &before);
  EXPECT_THAT(run.out, HasSubstr("threads 1\n"));
  EXPECT_THAT(run.err, HasSubstr(absl::StrCat(
                           "threads: 1, for rank 0 of 1 on this host, "
                           "processors ",
                           cpus[0])));
}

// ---- what ranks write ----

// Every line of the three ranks is whole, with "[rank] " before it or not.
void ExpectWholeLines(const std::string& text, bool prefixed) {
  std::vector<int> next(3, 0);
  for (std::string line : std::vector<std::string>(
           absl::StrSplit(text, absl::ByAnyChar("\r\n")))) {
    if (absl::EndsWith(line, "a bar") || absl::EndsWith(line, "its end")) {
      continue;
    }
    for (int r = 0; r < 3; ++r) {
      const std::string prefix = prefixed ? absl::StrCat("[", r, "] ") : "";
      if (line == absl::StrCat(prefix, "line ", next[r], " of ", r, " ends")) {
        ++next[r];
        line = "";
        break;
      }
    }
    ASSERT_EQ(line, "") << "is no whole line, or out of order";
  }
  EXPECT_THAT(next, testing::Each(kLines));
}

TEST(PrefixOutputTest, AutoLeavesStdoutAlone) {
  const Finished run = RunOne("shout", {"--world=3"});
  EXPECT_EQ(run.code, 0);
  EXPECT_THAT(run.out, Not(HasSubstr("[")));
  ExpectWholeLines(run.err, /*prefixed=*/true);
  for (int r = 0; r < 3; ++r) {
    EXPECT_THAT(run.err, AllOf(HasSubstr(absl::StrCat("[", r, "] a bar\r")),
                               HasSubstr(absl::StrCat("[", r, "] its end\n"))));
  }
}

TEST(PrefixOutputTest, OnTakesBoth) {
  const Finished run = RunOne("shout", {"--world=3", "--prefix_output=on"});
  EXPECT_EQ(run.code, 0);
  ExpectWholeLines(run.out, /*prefixed=*/true);
  ExpectWholeLines(run.err, /*prefixed=*/true);
}

TEST(PrefixOutputTest, OffTakesNone) {
  const Finished run = RunOne("shout", {"--world=2", "--prefix_output=off"});
  EXPECT_EQ(run.code, 0);
  EXPECT_THAT(run.out + run.err, Not(HasSubstr("[")));
}

TEST(PrefixOutputTest, LastWordsComeBeforeTheReport) {
  const Finished run = RunOne("last words", {"--world=2"});
  EXPECT_EQ(run.code, 128 + SIGSEGV);
  EXPECT_THAT(
      run.err,
      HasSubstr("[1] something is wrong\n[1] very\ntessera: rank 1 was ended "
                "by signal 11 (Segmentation fault)\n"));
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  // Ranks find their own number of threads.
  tessera::ServeForks(tessera::kProgram, &argc, &argv, /*threads=*/nullptr);
  if (const char* const program = getenv(tessera::kProgram)) {
    tessera::ExitAtOnce(tessera::RunProgram(program, argc, argv));
  }
  testing::InitGoogleTest(&argc, argv);
  tessera::RunTestsAndExit();
}
