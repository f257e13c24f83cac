// Start-ups in which a rank is stopped, killed or cut off at a seeded moment:
// all others must give up within the start-up timeout and 2 s, with an error
// that names the rank and what they were about, and end. (What a process of
// libtorch does between its last word and its end takes 0.3 s of a processor,
// however long that is on a busy host.) Over all ways to start ranks: a
// launcher, by hand at a port, by hand with a file, two hosts (namespaces,
// where they can be made). This program run again with kRankVariable set is a
// rank.
//
//   startup_seeds_test [--seeds=8] [--first_seed=0]
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/env.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "comm/world/world.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/launch/startup_run.h"
#include "tests/launch/two_hosts.h"
#include "tests/support/fork_server.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"
#include "third_party/gtest/run_and_exit.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;

int g_seeds = 8;
int g_first_seed = 0;

// Longer than ranks take until they are connected, also on a busy host.
constexpr int kTimeoutS = 4;
#if __has_feature(address_sanitizer)
constexpr absl::Duration kLate = absl::Seconds(10);  // all is slower
#else
constexpr absl::Duration kLate = absl::Seconds(2);
#endif
// The time that the program itself takes before it calls Init.
constexpr absl::Duration kLoading = absl::Seconds(60);

// ---- the program of a rank ----

int RankMain(const std::string& rank, int argc, char** argv) {
  // It must run before libtorch starts threads, which the mount namespace
  // forbids.
  if (!TwoHosts::EnterIfTold()) return 1;
  std::vector<std::string> args(argv, argv + argc);
  if (rank != "launched") {
    args = absl::StrSplit(EnvString(kArgsVariable).value_or(""), ' ');
    args.insert(args.begin(), "program");
  }
  std::vector<char*> words;
  for (std::string& arg : args) words.push_back(arg.data());
  words.push_back(nullptr);
  int count = static_cast<int>(args.size());
  std::fprintf(stderr, "%s%d\n", kReadyLine, getpid());
  WorldOptions options;
  options.dump_folder = "off";
  const absl::Status status = CatchTorch(
      "start-up", [&] { return Init(&count, words.data(), options).status(); });
  std::fprintf(stderr, "%s\n",
               status.ok() ? kStartedLine : status.ToString().c_str());
  Shutdown();
  return status.ok() ? 0 : 1;
}

// ---- the seeds ----

enum class Way { kLauncher, kPort, kFile, kTwoHosts };
enum class Harm { kStop, kKill, kCut };
enum class Moment { kAtOnce, kReady, kMet };

const char* const kWays[] = {"by a launcher", "at a port", "with a file",
                             "on two hosts"};
const char* const kHarms[] = {"stopped", "killed", "cut off"};
const char* const kMoments[] = {"at once", "at Init", "once all have met"};

struct Plan {
  Way way;
  Harm harm;
  Moment moment;
  int world_size, victim;
  absl::Duration delay;

  std::string ToText() const {
    return absl::StrCat(world_size, " ranks ", kWays[static_cast<int>(way)],
                        ", rank ", victim, " ", kHarms[static_cast<int>(harm)],
                        " ", kMoments[static_cast<int>(moment)], " and ",
                        absl::FormatDuration(delay));
  }
  // Whose end the others are to name: with the cable cut, those of the other
  // host.
  std::vector<int> GoneFor(int rank) const {
    if (harm != Harm::kCut) return {victim};
    return rank < 2 ? std::vector<int>{2, 3} : std::vector<int>{0, 1};
  }
};

Plan PlanOf(int seed) {
  std::mt19937 random(seed);
  auto up_to = [&](int n) { return static_cast<int>(random() % n); };
  Plan plan;
  plan.way = static_cast<Way>(seed % 4);
  plan.world_size = plan.way == Way::kTwoHosts ? 4 : 2 + up_to(2);
  plan.victim = up_to(plan.world_size);
  plan.harm = static_cast<Harm>(up_to(plan.way == Way::kTwoHosts ? 3 : 2));
  // A launcher's ranks are known once they are ready.
  plan.moment = plan.way == Way::kLauncher ? static_cast<Moment>(1 + up_to(2))
                                           : static_cast<Moment>(up_to(3));
  // Meeting takes some 50 ms where all come at once, connecting as much.
  plan.delay = absl::Microseconds(up_to(2) == 0 ? up_to(8000) : up_to(80000));
  return plan;
}

class StartupSeeds : public testing::Test {
 protected:
  static void TearDownTestSuite() { hosts_ = nullptr; }

  // False where this way does not exist.
  bool Start(const Plan& plan, const TempFolder& folder, StartupRun* run) {
    const std::string timeout = absl::StrCat("--startup_timeout=", kTimeoutS);
    if (plan.way == Way::kLauncher) {
      run->Launch(timeout);
      return true;
    }
    std::string where = absl::StrCat("tcp://127.0.0.1:", FreePort());
    if (plan.way == Way::kFile)
      where = absl::StrCat("file://", folder / "meet");
    if (plan.way == Way::kTwoHosts) {
      if (hosts_ == nullptr) {
        hosts_ = std::make_unique<TwoHosts>("beta", testing::TempDir());
      }
      if (!hosts_->trouble().empty()) return false;
      where = absl::StrCat("tcp://", TwoHosts::kAddresses[0], ":29517");
    }
    for (int r = 0; r < plan.world_size; ++r) {
      Env env;
      if (plan.way == Way::kTwoHosts) env.push_back(hosts_->Place(r / 2));
      run->StartRank(r, absl::StrCat(timeout, " --rendezvous=", where), env);
    }
    return true;
  }

  static void Hurt(const Plan& plan, StartupRun* run) {
    const int r = plan.victim;
    const absl::Time patience = absl::Now() + kLoading;
    if (plan.moment != Moment::kAtOnce) {
      EXPECT_TRUE(run->WaitUntilSays(r, kReadyLine, patience));
    }
    if (plan.moment == Moment::kMet) {
      EXPECT_TRUE(run->WaitUntilSays(r, "threads: ", patience));
    }
    run->WaitUntil(absl::Now() + plan.delay);
    if (plan.harm == Harm::kCut) {
      EXPECT_TRUE(hosts_->SetCable(r / 2, /*up=*/false));
    } else {
      kill((*run)[r].pid, plan.harm == Harm::kStop ? SIGSTOP : SIGKILL);
    }
  }

  // Returns how long after its time the slowest of the others ended.
  absl::Duration Judge(const Plan& plan, StartupRun* run) {
    const int except = plan.harm == Harm::kCut ? -1 : plan.victim;
    absl::Time last = absl::Now();
    for (int r = 0; r < plan.world_size; ++r) {
      if (r == except) continue;
      EXPECT_TRUE(run->WaitUntilSays(r, kReadyLine, last + kLoading));
      last = std::max(last, (*run)[r].ready);
    }
    const absl::Duration timeout = absl::Seconds(kTimeoutS);
    run->WaitUntilEnded(except, last + timeout + 5 * kLate);
    absl::Duration latest = -absl::InfiniteDuration();
    for (int r = 0; r < plan.world_size; ++r) {
      if (r == except) continue;
      const StartedRank& rank = (*run)[r];
      const absl::Duration took = rank.told - rank.ready;
      EXPECT_LT(took, timeout + kLate) << "rank " << r << " said\n"
                                       << rank.words;
      EXPECT_LT(rank.ended - rank.ready, timeout + 5 * kLate)
          << "rank " << r << " said\n"
          << rank.words;
      latest = std::max(latest, took - timeout);
      last_end_ = std::max(last_end_, rank.ended - rank.ready - timeout);
      if (rank.Says(kStartedLine)) continue;  // it came too late
      EXPECT_THAT(rank.LastLine(),
                  AllOf(ContainsRegex(absl::StrCat(
                            "ranks? ([0-9]+, )*(",
                            absl::StrJoin(plan.GoneFor(r), "|"), ")")),
                        ContainsRegex("rendezvous|connected|connects|start")))
          << "rank " << r << " said\n"
          << rank.words;
    }
    return latest;
  }

  absl::Duration last_end_ = -absl::InfiniteDuration();
  static std::unique_ptr<TwoHosts> hosts_;
};
std::unique_ptr<TwoHosts> StartupSeeds::hosts_;

TEST_F(StartupSeeds, TheOthersEndInTimeAndNameTheRank) {
  absl::Duration latest = -absl::InfiniteDuration();
  for (int seed = g_first_seed; seed < g_first_seed + g_seeds; ++seed) {
    const Plan plan = PlanOf(seed);
    SCOPED_TRACE(absl::StrCat("seed ", seed, ": ", plan.ToText()));
    const TempFolder folder;
    StartupRun run(plan.world_size);
    if (!Start(plan, folder, &run)) continue;
    Hurt(plan, &run);
    const absl::Duration late = Judge(plan, &run);
    std::printf("seed %d: %s: %s\n", seed, plan.ToText().c_str(),
                absl::FormatDuration(late).c_str());
    latest = std::max(latest, late);
    if (plan.harm == Harm::kCut) {
      EXPECT_TRUE(hosts_->SetCable(plan.victim / 2, /*up=*/true));
    }
  }
  std::printf(
      "%d seeds; the last gave up %s after the timeout, and ended %s after "
      "it\n",
      g_seeds, absl::FormatDuration(latest).c_str(),
      absl::FormatDuration(last_end_).c_str());
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  using namespace tessera;  // NOLINT
  ServeForks(kRankVariable, &argc, &argv);
  TwoHosts::ServeIfHelper(argc, argv);
  const std::optional<std::string> rank = EnvString(kRankVariable);
  if (rank.has_value()) ExitAtOnce(RankMain(*rank, argc, argv));
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
  RunTestsAndExit();
}
