// Two ranks of a user who may have only so many threads (ulimit -u), for every
// such number from "not even one more" on: each rank starts, serves shards and
// ends well, or ends with an error; none is ended by a signal, and none hangs.
// Needs root, to become a user who owns no process. This program run again with
// kLimit set is a rank.
#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/env.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "comm/launch/launcher.h"
#include "comm/launch/subprocess.h"
#include "comm/rendezvous/hosted_store.h"
#include "comm/shard_server.h"
#include "comm/world/world.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/fork_server.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace tessera {
namespace {

using ::testing::ContainsRegex;

constexpr char kLimit[] = "TESSERA_THREAD_LIMIT";
constexpr uid_t kUser = 54321;
constexpr int kRanks = 2;
constexpr absl::Duration kStuck = absl::Seconds(30);

// ---- the program of a rank ----

absl::Status StartAndServe() {
  char name[] = "program";
  char timeout[] = "--startup_timeout=10";
  char* argv[] = {name, timeout, nullptr};
  int argc = 2;
  WorldOptions options;
  options.dump_folder = "off";
  options.collective_timeout = absl::Seconds(10);
  TESSERA_ASSIGN_OR_RETURN(const World* world, Init(&argc, argv, options));
  Communicator& comm = *world->communicator();
  TESSERA_RETURN_IF_ERROR(comm.Barrier("begin"));
  TESSERA_RETURN_IF_ERROR(comm.ServeShards({"shards"}).status());
  return comm.Barrier("end");
}

int RankMain(const std::string& limit) {
  const rlim_t threads = std::strtoul(limit.c_str(), nullptr, 10);
  const rlimit both = {threads, threads};
  if (setgroups(0, nullptr) != 0 || setgid(kUser) != 0 || setuid(kUser) != 0 ||
      setrlimit(RLIMIT_NPROC, &both) != 0) {
    return 99;
  }
  const absl::Status status =
      CatchTorch("rank", [] { return StartAndServe(); });
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  Shutdown();
  return status.ok() ? 0 : 1;
}

// ---- the test ----

struct Rank {
  pid_t pid = 0;  // 0: has ended
  int err = -1;
  int wait_status = 0;
};

std::string ReadAll(int fd) {
  std::string text;
  char buffer[4096];
  for (ssize_t got; (got = read(fd, buffer, sizeof(buffer))) > 0;) {
    text.append(buffer, static_cast<size_t>(got));
  }
  return text;
}

// Starts the ranks and, as their launcher does, tells those that still start of
// one that has ended. False if they hang.
bool Run(int limit, std::vector<Rank>* ranks) {
  HostedStore store = HostedStore::Start(kRanks).value();
  for (int r = 0; r < kRanks; ++r) {
    Environment env = LocalRankEnvironment(r, kRanks, store.Environment());
    env.emplace_back(kLimit, absl::StrCat(limit));
    int pipe[2];
    if (pipe2(pipe, O_CLOEXEC) != 0) abort();
    Rank& rank = ranks->emplace_back();
    rank.pid =
        ForkServer::Get().value()->Fork(env, pipe[1], STDIN_FILENO).value();
    rank.err = pipe[0];
    close(pipe[1]);
  }
  const absl::Time deadline = absl::Now() + kStuck;
  int alive = kRanks;
  while (alive > 0 && absl::Now() < deadline) {
    for (int r = 0; r < kRanks; ++r) {
      Rank& rank = (*ranks)[r];
      if (rank.pid == 0 ||
          waitpid(rank.pid, &rank.wait_status, WNOHANG) != rank.pid) {
        continue;
      }
      rank.pid = 0;
      --alive;
      if (rank.wait_status != 0) store.Fail(absl::StrCat("rank ", r, " ended"));
    }
    absl::SleepFor(absl::Milliseconds(2));
  }
  return alive == 0;
}

// Whether both ended well.
bool EndsWithoutASignal(int limit) {
  std::vector<Rank> ranks;
  EXPECT_TRUE(Run(limit, &ranks)) << "at " << limit << " threads it hangs";
  bool well = true;
  std::string all;
  for (Rank& rank : ranks) {
    if (rank.pid != 0) {
      kill(rank.pid, SIGKILL);
      waitpid(rank.pid, &rank.wait_status, 0);
    }
    const std::string said = ReadAll(rank.err);
    close(rank.err);
    const int code = ShellExitCode(rank.wait_status);
    EXPECT_TRUE(code == 0 || code == 1)
        << "at " << limit << " threads it " << DescribeExit(rank.wait_status)
        << " and said\n"
        << said;
    well = well && code == 0;
    absl::StrAppend(&all, said);
  }
  if (!well) {
    EXPECT_THAT(all, ContainsRegex("thread|Resource temporarily unavailable"))
        << "at " << limit;
  }
  return well;
}

TEST(ThreadLimitTest, AnErrorAndNeverASignal) {
  if (getuid() != 0) GTEST_SKIP() << "needs root";
  // A store lets in its own user's ranks only. What starts them stays root.
  (void)ForkServer::Get().value();
  ASSERT_EQ(seteuid(kUser), 0);
  int limit = 1;
  while (limit < 60 && !EndsWithoutASignal(limit) && !HasFailure()) ++limit;
  EXPECT_LT(limit, 60);
  EXPECT_GT(limit, 4) << "no limit was reached";
  std::printf("two ranks need %d threads\n", limit);
  EXPECT_EQ(seteuid(0), 0);
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  tessera::ServeForks();
  const auto limit = tessera::EnvString(tessera::kLimit);
  if (limit.has_value()) return tessera::RankMain(*limit);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
