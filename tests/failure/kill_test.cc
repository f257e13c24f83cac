// Training in real processes, one of which is killed, or stopped, at a seeded
// instant: what the others say, how soon, and what is left behind. This program
// run again with kProgram set is a rank.
//
//   kill_test [--seeds=20] [--first_seed=0]
#include <dirent.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/env.h"
#include "base/file.h"
#include "base/status_matchers.h"
#include "comm/launch/launcher.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/failure/kill_ranks.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

#if __has_feature(address_sanitizer)
constexpr absl::Duration kSurvivorsEnd = absl::Seconds(10);  // all is slower
#else
constexpr absl::Duration kSurvivorsEnd = absl::Seconds(2);
#endif

int g_seeds = 20;
int g_first_seed = 0;

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
    // Who does not quote the other has written its own.
    const std::string own = absl::StrCat("tessera-hang-rank", r, "-");
    if (!absl::StrContains(line, own)) continue;
    ++told_of_own;
    std::string dump;
    for (const std::string& name : folder.Names()) {
      if (!absl::StartsWith(name, own)) continue;
      dump = ReadWholeFile(folder.path() + "/" + name).value();
    }
    EXPECT_THAT(dump,
                AllOf(HasSubstr("\"tessera-comm\""), HasSubstr(" main (")));
    // A shard that is pulled is no collective.
    if (!absl::StrContains(line, "(pull")) {
      EXPECT_THAT(dump, HasSubstr("RUNNING"));
    }
  }
  EXPECT_GE(told_of_own, 1);
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
