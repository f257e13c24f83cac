// Training in real processes, one of which is killed, or stopped, at a seeded
// instant: what the others say, how soon, and what is left behind. This program
// run again with kProgram set is a rank.
//
//   kill_test [--seeds=20] [--first_seed=0]
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/env.h"
#include "base/file.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "base/torch_guard.h"
#include "comm/launcher.h"
#include "comm/rendezvous.h"
#include "comm/subprocess.h"
#include "comm/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/models.h"
#include "tests/process.h"
#include "tests/rank_pool.h"
#include "tests/temp_folder.h"
#include "tests/training.h"
#include "torch/torch.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr char kProgram[] = "TESSERA_KILL_TEST_RANK";
#if __has_feature(address_sanitizer)
constexpr absl::Duration kSurvivorsEnd = absl::Seconds(10);  // all is slower
#else
constexpr absl::Duration kSurvivorsEnd = absl::Seconds(2);
#endif

int g_seeds = 20;
int g_first_seed = 0;

// ---- a rank ----

// The phases, by the byte that the victim writes to stdout as it enters one.
constexpr char kPhases[] = "ICFBSK";
//   I  start-up     C  making the engine   F  forward
//   B  reduction    S  step                K  checkpoint

struct RankSpec {
  int stage = 0;
  bool marks = false;  // writes its phases
  absl::Duration timeout = absl::Minutes(5);
  std::string folder;

  std::string ToText() const {
    return absl::StrCat(stage, " ", marks ? 1 : 0, " ",
                        absl::FormatDuration(timeout), " ", folder);
  }
  static RankSpec FromText(const std::string& text) {
    std::string timeout;
    RankSpec spec;
    std::istringstream(text) >> spec.stage >> spec.marks >> timeout >>
        spec.folder;
    absl::ParseDuration(timeout, &spec.timeout);
    return spec;
  }
};

// Trains until it is ended.
absl::Status TrainForEver(const RankSpec& spec, int argc, char** argv) {
  auto enter = [&](char phase) {
    if (spec.marks && write(STDOUT_FILENO, &phase, 1) != 1) _exit(99);
  };
  enter('I');
  WorldOptions options;
  options.backend = DefaultBackend();
  int rank = 0;
  if (absl::SimpleAtoi(EnvString("RANK").value_or(""), &rank)) {
    options.memory_group = DefaultMemoryGroup(rank);
  }
  options.collective_timeout = spec.timeout;
  options.dump_folder = spec.folder;
  TESSERA_ASSIGN_OR_RETURN(const World* world, Init(&argc, argv, options));
  enter('C');
  auto model = BuildModel("Mlp", world->rank());
  TrainingSpec training;
  training.stage = spec.stage;
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, training, world->communicator()));
  for (int64_t step = 0;; ++step) {
    enter('F');
    TESSERA_ASSIGN_OR_RETURN(at::Tensor loss, CatchTorch("forward", [&] {
                               return model->Loss(world->rank(), step);
                             }));
    enter('B');
    TESSERA_RETURN_IF_ERROR(engine->Backward(loss));
    enter('S');
    TESSERA_RETURN_IF_ERROR(engine->Step());
    if (step % 3 != 2) continue;
    enter('K');
    TESSERA_RETURN_IF_ERROR(engine->SaveCheckpoint(spec.folder + "/state"));
  }
}

int RunRank(const std::string& text, int argc, char** argv) {
  const absl::Status status =
      TrainForEver(RankSpec::FromText(text), argc, argv);
  Shutdown();
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return 1;
}

// ---- the test's side of it ----

// A folder that must hold nothing but checkpoints at the end.
class Folder : public TempFolder {
 public:
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    DIR* const dir = opendir(path().c_str());
    while (const dirent* entry = readdir(dir)) {
      const std::string name = entry->d_name;
      if (name != "." && name != "..") names.push_back(name);
    }
    closedir(dir);
    std::sort(names.begin(), names.end());
    return names;
  }
};

// Is anybody listening there?
bool IsListening(uint16_t port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  const bool listening =
      connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  close(fd);
  return listening;
}

struct Rank {
  pid_t pid = 0;
  int out = -1;
  int err = -1;
  std::string words;  // stderr
  absl::Time ended = absl::InfinitePast();
  int code = 0;

  // The last that is our own: threads of libtorch may go on writing after it,
  // in lines that begin with a bracket.
  std::string LastLine() const {
    std::vector<std::string> lines =
        absl::StrSplit(absl::StripSuffix(words, "\n"), '\n');
    while (lines.size() > 1 && absl::StartsWith(lines.back(), "[")) {
      lines.pop_back();
    }
    return lines.back();
  }
};

// Ranks, and this process as their launcher: it hosts the store, unless rank 0
// is to, and tells the store who has ended.
class Ranks {
 public:
  Ranks(int world_size, int victim, RankSpec spec, bool rank0_hosts = false)
      : ranks_(world_size) {
    if (!rank0_hosts) store_ = HostedStore::Start().value();
    port_ = rank0_hosts ? static_cast<uint16_t>(FreePort()) : store_->port();
    for (int r = 0; r < world_size; ++r) {
      spec.marks = r == victim;
      Start(r, spec);
    }
  }
  ~Ranks() {
    for (Rank& rank : ranks_) {
      if (rank.pid != 0) kill(rank.pid, SIGKILL);
    }
    WaitUntilEnded(absl::Now() + absl::Seconds(20), -1);
    for (Rank& rank : ranks_) {
      close(rank.out);
      close(rank.err);
    }
  }

  Rank& operator[](int r) { return ranks_[r]; }
  uint16_t port() const { return port_; }

  // Until `rank` has entered `phase` `times` times; false if it ends before.
  bool WaitForPhase(int rank, char phase, int times) {
    char entered = 0;
    while (times > 0) {
      pollfd fd = {ranks_[rank].out, POLLIN, 0};
      if (poll(&fd, 1, 60000) <= 0 ||
          read(ranks_[rank].out, &entered, 1) != 1) {
        return false;
      }
      times -= entered == phase;
    }
    return true;
  }

  // Until all but `except` have ended; false if they have not at `deadline`.
  bool WaitUntilEnded(absl::Time deadline, int except) {
    while (true) {
      bool all = true;
      for (size_t r = 0; r < ranks_.size(); ++r) {
        Reap(static_cast<int>(r));
        all &= ranks_[r].pid == 0 || static_cast<int>(r) == except;
      }
      if (all || absl::Now() >= deadline) return all;
      absl::SleepFor(absl::Milliseconds(2));
    }
  }

 private:
  void Start(int r, const RankSpec& spec) {
    int out[2];
    int err[2];
    if (pipe2(out, O_CLOEXEC) != 0 || pipe2(err, O_CLOEXEC) != 0) abort();
    fcntl(err[0], F_SETFL, O_NONBLOCK);
    SelfExecOptions child;
    child.argv = {"rank"};
    child.env = LocalRankEnvironment(r, static_cast<int>(ranks_.size()), port_);
    // Where the launcher hosts no store the ranks must not think so.
    if (!store_.has_value()) child.env.resize(6);
    child.env.emplace_back("OMP_NUM_THREADS", "1");
    child.env.emplace_back("TMPDIR", spec.folder);
    child.env.emplace_back(kProgram, spec.ToText());
    child.fds = {{out[1], STDOUT_FILENO}, {err[1], STDERR_FILENO}};
    ranks_[r].pid = SpawnSelf(child).value();
    close(out[1]);
    close(err[1]);
    ranks_[r].out = out[0];
    ranks_[r].err = err[0];
  }

  void Reap(int r) {
    Rank& rank = ranks_[r];
    if (rank.pid == 0) return;
    int wait_status = 0;
    const bool ended = waitpid(rank.pid, &wait_status, WNOHANG) == rank.pid;
    char buffer[4096];
    ssize_t got = 0;
    while ((got = read(rank.err, buffer, sizeof(buffer))) > 0) {
      rank.words.append(buffer, got);
    }
    if (!ended) return;
    rank.pid = 0;
    rank.ended = absl::Now();
    rank.code = ShellExitCode(wait_status);
    if (store_.has_value()) {
      store_->Fail(absl::StrCat("rank ", r, " ", DescribeExit(wait_status),
                                " before the job had started"));
    }
  }

  std::optional<HostedStore> store_;
  uint16_t port_ = 0;
  std::vector<Rank> ranks_;
};

struct Plan {
  int stage, world_size, victim, times;
  char phase;
  absl::Duration delay;
  bool rank0_hosts;

  std::string ToText() const {
    return absl::StrCat("stage ", stage, ", ", world_size, " ranks, rank ",
                        victim, " in phase ", std::string(1, phase), " number ",
                        times, " after ", absl::FormatDuration(delay),
                        rank0_hosts ? ", rank 0 hosts the store" : "");
  }
};

Plan PlanOf(int seed) {
  std::mt19937 random(seed);
  auto up_to = [&](int n) { return static_cast<int>(random() % n); };
  Plan plan;
  plan.stage = seed % 4;
  plan.world_size = 2 + seed / 4 % 3;
  plan.victim = up_to(plan.world_size);
  plan.phase = kPhases[seed % 6];
  const bool repeats = plan.phase != 'I' && plan.phase != 'C';
  plan.times = repeats ? 1 + up_to(4) : 1;
  // Start-up takes some 0.1 s after the libraries are loaded, a phase of a step
  // a few ms.
  plan.delay = absl::Microseconds(up_to(plan.phase == 'I'   ? 150000
                                        : plan.phase == 'C' ? 20000
                                                            : 4000));
  // Nobody can tell of a rank that never came to a store without a launcher.
  plan.rank0_hosts = plan.phase != 'I' && plan.phase != 'C' && up_to(3) == 0;
  return plan;
}

TEST(KillTest, TheSurvivorsEndSoonAndNameTheDead) {
  absl::Duration longest;
  for (int seed = g_first_seed; seed < g_first_seed + g_seeds; ++seed) {
    const Plan plan = PlanOf(seed);
    SCOPED_TRACE(absl::StrCat("seed ", seed, ": ", plan.ToText()));
    Folder folder;
    RankSpec spec;
    spec.stage = plan.stage;
    spec.folder = folder.path();
    uint16_t port = 0;
    {
      Ranks ranks(plan.world_size, plan.victim, spec, plan.rank0_hosts);
      port = ranks.port();
      ASSERT_TRUE(ranks.WaitForPhase(plan.victim, plan.phase, plan.times));
      absl::SleepFor(plan.delay);
      const absl::Time killed = absl::Now();
      kill(ranks[plan.victim].pid, SIGKILL);
      EXPECT_TRUE(ranks.WaitUntilEnded(killed + absl::Seconds(20), -1));
      for (int r = 0; r < plan.world_size; ++r) {
        if (r == plan.victim) continue;
        const absl::Duration took = ranks[r].ended - killed;
        longest = std::max(longest, took);
        EXPECT_LT(took, kSurvivorsEnd) << "rank " << r << " wrote\n"
                                       << ranks[r].words;
        EXPECT_EQ(ranks[r].code, 1);
        EXPECT_THAT(ranks[r].LastLine(),
                    ContainsRegex(absl::StrCat(
                        "rank ", plan.victim,
                        " (has ended|was ended by signal 9|failed)")))
            << "rank " << r << " wrote\n"
            << ranks[r].words;
      }
    }
    for (const std::string& name : folder.Names()) {
      EXPECT_THAT(name, testing::StartsWith("state"));
    }
    EXPECT_FALSE(IsListening(port));
  }
  std::printf("%d seeds; the slowest survivor took %s\n", g_seeds,
              absl::FormatDuration(longest).c_str());
}

// ---- a rank that is stopped ----

class StopTest : public testing::TestWithParam<std::tuple<int, bool>> {};

// The middle of training: rank `victim` hangs, and nobody is dead.
TEST_P(StopTest, TheOthersNameItTheCollectiveAndTheUnit) {
  const auto [stage, rank0_hosts] = GetParam();
  const int victim = rank0_hosts ? 0 : 1;
  constexpr absl::Duration kTimeout = absl::Seconds(5);
  Folder folder;
  RankSpec spec;
  spec.stage = stage;
  spec.timeout = kTimeout;
  spec.folder = folder.path();
  Ranks ranks(3, victim, spec, rank0_hosts);
  ASSERT_TRUE(ranks.WaitForPhase(victim, 'F', 1));
  // It tells the others about once a second what it does.
  const absl::Time begin = absl::Now();
  do {
    ASSERT_TRUE(ranks.WaitForPhase(victim, 'F', 1));
  } while (absl::Now() - begin < absl::Seconds(3));
  kill(ranks[victim].pid, SIGSTOP);
  const absl::Time stopped = absl::Now();
  EXPECT_TRUE(ranks.WaitUntilEnded(stopped + absl::Seconds(30), victim));
  int told_of_own = 0;
  for (int r = 0; r < 3; ++r) {
    if (r == victim) continue;
    // Not before its time, and soon after it (stacks are written meanwhile).
    EXPECT_GT(ranks[r].ended - stopped, kTimeout - absl::Seconds(1));
    EXPECT_LT(ranks[r].ended - stopped, kTimeout + absl::Seconds(8));
    EXPECT_EQ(ranks[r].code, 1);
    const std::string line = ranks[r].LastLine();
    EXPECT_THAT(
        line,
        AllOf(
            HasSubstr("DEADLINE_EXCEEDED: "),
            ContainsRegex("(unit|agreement|broadcast|parameters|checkpoint)"),
            ContainsRegex(" #[0-9]+ \\((pull|all-gather|reduce-scatter sum|"
                          "all-reduce sum|broadcast from rank 0|agreement)"),
            HasSubstr("has not ended within 5s: "),
            ContainsRegex(absl::StrCat(
                "rank ", victim,
                " has not (come|sent its shard [0-9]+ of version [0-9]+) \\(")),
            ContainsRegex(
                rank0_hosts
                    ? "ago, (in|out of) .*it is stopped.*the store does not "
                      "answer"
                    : "last heard of [3-9].*s ago, (in|out of) [^;]* #[0-9]+ "
                      "\\([^;]*: it is stopped"),
            // Whoever gives up first may be quoted by the other.
            HasSubstr("tessera-hang-rank")));
    told_of_own += absl::StrContains(line, absl::StrCat("hang-rank", r));
  }
  EXPECT_GE(told_of_own, 1);
  int dumps = 0;
  for (const std::string& name : folder.Names()) {
    if (!absl::StartsWith(name, "tessera-hang-rank")) continue;
    ++dumps;
    EXPECT_THAT(
        ReadWholeFile(folder.path() + "/" + name),
        IsOkAndHolds(AllOf(HasSubstr("RUNNING"), HasSubstr("\"tessera-comm\""),
                           HasSubstr(" main ("))));
  }
  EXPECT_EQ(dumps, 2);
}

INSTANTIATE_TEST_SUITE_P(
    Stages, StopTest,
    testing::Values(std::make_tuple(0, false), std::make_tuple(3, false),
                    std::make_tuple(2, true)),
    [](const testing::TestParamInfo<std::tuple<int, bool>>& info) {
      return absl::StrCat("Stage", std::get<0>(info.param),
                          std::get<1>(info.param) ? "StoreOfTheStopped" : "");
    });

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  using namespace tessera;  // NOLINT
  const std::optional<std::string> rank = EnvString(kProgram);
  if (rank.has_value()) return RunRank(*rank, argc, argv);
  testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    absl::string_view arg = argv[i];
    int* const value = absl::ConsumePrefix(&arg, "--seeds=") ? &g_seeds
                       : absl::ConsumePrefix(&arg, "--first_seed=")
                           ? &g_first_seed
                           : nullptr;
    if (value == nullptr || !absl::SimpleAtoi(arg, value)) {
      std::fprintf(stderr, "unknown argument %s\n", argv[i]);
      return 2;
    }
  }
  return RUN_ALL_TESTS();
}
