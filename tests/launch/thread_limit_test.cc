// Runs two ranks of a user who may have only so many threads (ulimit -u), for
// every such number from "not even one more" on: each rank starts, serves
// shards and ends well, or ends with an error; none is ended by a signal, and
// none hangs. It needs root, to become a user who owns no process. This
// program, run again with kLimit set, is a rank.
//
// It also runs two ranks under --world whose host, limits or variables are at
// fault: the error names the cause, and what to do. With kCause set this
// program is these ranks.
#include <fcntl.h>
#include <grp.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
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
#include "tests/support/process.h"
#include "third_party/gtest/run_and_exit.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace tessera {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kLimit[] = "TESSERA_THREAD_LIMIT";
constexpr char kCause[] = "TESSERA_CAUSE";  // "name" or "name number"
constexpr uid_t kUser = 54321;
constexpr int kRanks = 2;
constexpr absl::Duration kStuck = absl::Seconds(30);

// ---- the program of a rank ----

absl::Status StartAndServe(const std::string& world_flag = "") {
  std::string name = "program";
  std::string timeout = "--startup_timeout=10";
  std::string flag = world_flag;
  char* argv[] = {name.data(), timeout.data(), flag.data(), nullptr};
  int argc = flag.empty() ? 2 : 3;
  if (flag.empty()) argv[2] = nullptr;
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

// ---- what is at fault ----

bool SetLoopback(bool up, bool with_address) {
  const int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  ifreq lo = {};
  std::strcpy(lo.ifr_name, "lo");
  lo.ifr_flags = static_cast<short>(up ? IFF_UP | IFF_LOOPBACK : 0);
  bool done = ioctl(fd, SIOCSIFFLAGS, &lo) == 0;
  if (done && up && !with_address) {
    auto* const address = reinterpret_cast<sockaddr_in*>(&lo.ifr_addr);
    *address = {};
    address->sin_family = AF_INET;  // 0.0.0.0 takes it away
    done = ioctl(fd, SIOCSIFADDR, &lo) == 0;
  }
  close(fd);
  return done;
}

bool SetLimit(decltype(RLIMIT_AS) which, rlim_t value) {
  const rlimit both = {value, value};
  return setrlimit(which, &both) == 0;
}

rlim_t AddressSpace() {
  unsigned long pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<rlim_t>(sysconf(_SC_PAGESIZE));
}

// Limits this process, and the ranks that it will start.
bool MakeCause(const std::string& name, int number) {
  if (name == "files") return SetLimit(RLIMIT_NOFILE, number);
  if (name == "address space") {
    return SetLimit(RLIMIT_AS, AddressSpace() + (rlim_t{1} << 20) * number);
  }
  if (name == "no proc") {
    return unshare(CLONE_NEWNS) == 0 &&
           mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
           umount2("/proc", MNT_DETACH) == 0;
  }
  if (name == "lo down") return unshare(CLONE_NEWNET) == 0;
  if (name == "lo bare") {
    return unshare(CLONE_NEWNET) == 0 &&
           SetLoopback(/*up=*/true, /*with_address=*/false);
  }
  return true;
}

int CauseMain(const std::string& cause) {
  const std::vector<std::string> words = absl::StrSplit(cause, ' ');
  int number = 0;
  const bool has_number = absl::SimpleAtoi(words.back(), &number);
  const std::string name =
      has_number ? cause.substr(0, cause.rfind(' ')) : cause;
  // Ranks have it from their launcher; but one whose address space is full
  // could not be executed.
  const bool in_ranks = name == "address space";
  if ((getenv("RANK") != nullptr) == in_ranks && !MakeCause(name, number)) {
    std::perror(cause.c_str());
    return 98;
  }
  const absl::Status status =
      CatchTorch("rank", [] { return StartAndServe("--world=2"); });
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  Shutdown();
  return status.ok() ? 0 : 1;
}

Finished RunUnder(const std::string& cause, Env env = {}) {
  env.emplace_back(kCause, cause);
  env.emplace_back("OMP_NUM_THREADS", "1");
  return Process({}, env).Finish(absl::Seconds(60));
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
    SelfExecOptions options;
    options.env = env;
    options.fds = {{pipe[1], STDERR_FILENO}};
    rank.pid = ForkSelf(options).value();
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
  ASSERT_EQ(seteuid(kUser), 0);
  int limit = 1;
  while (limit < 60 && !EndsWithoutASignal(limit) && !HasFailure()) ++limit;
  EXPECT_LT(limit, 60);
  EXPECT_GT(limit, 4) << "no limit was reached";
  std::printf("two ranks need %d threads\n", limit);
  EXPECT_EQ(seteuid(0), 0);
}

TEST(CauseTest, ErrorsNameWhatIsAtFaultAndWhatToDo) {
  if (getuid() != 0) GTEST_SKIP() << "needs root";
  const std::vector<std::pair<std::string, std::string>> causes = {
      {"lo down", "loopback cannot be used.*ip link set lo up"},
      {"lo bare", "loopback cannot be used.*ip addr add 127.0.0.1/8"},
      {"no proc", "/proc/self/exe is not there; mount /proc"},
      {"files 8", "ulimit -n"},
      {"files 16", "ulimit -n"},
  };
  for (const auto& [cause, said] : causes) {
    const Finished run = RunUnder(cause);
    EXPECT_EQ(run.code, 1) << cause << ": " << run.err;
    EXPECT_THAT(run.err, ContainsRegex(said)) << cause;
  }
}

// The limit goes from "not one more" up until it suffices. A rank that fails
// says for lack of what.
TEST(CauseTest, OfFilesThatMayBeOpen) {
  int limit = 10;
  for (; limit < 100; limit += 3) {
    const Finished run = RunUnder(absl::StrCat("files ", limit));
    if (run.code == 0) break;
    EXPECT_THAT(run.err, ContainsRegex("ulimit -n|too many open files|"
                                       "Too many open files"))
        << limit;
    EXPECT_LT(run.code, 128) << limit << ": " << run.err;
  }
  std::printf("two ranks need %d files\n", limit);
  EXPECT_LT(limit, 100);
}

TEST(CauseTest, OfTheAddressSpace) {
#if __has_feature(address_sanitizer)
  GTEST_SKIP() << "which takes all of it";
#endif
  int mib = 1;
  for (; mib < 2000; mib *= 4) {
    const Finished run = RunUnder(absl::StrCat("address space ", mib));
    if (run.code == 0) break;
    EXPECT_THAT(run.err, ContainsRegex("ulimit -v|memory")) << mib;
    EXPECT_THAT(run.err, Not(HasSubstr("limit of processes"))) << mib;
  }
  std::printf("two ranks need %d MiB of address space\n", mib);
  EXPECT_LT(mib, 2000);
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  tessera::ServeForks(tessera::kCause, &argc, &argv);
  const auto limit = tessera::EnvString(tessera::kLimit);
  if (limit.has_value()) tessera::ExitAtOnce(tessera::RankMain(*limit));
  const auto cause = tessera::EnvString(tessera::kCause);
  if (cause.has_value()) tessera::ExitAtOnce(tessera::CauseMain(*cause));
  testing::InitGoogleTest(&argc, argv);
  tessera::RunTestsAndExit();
}
