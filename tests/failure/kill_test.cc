// Training in real processes, one of which is killed at a seeded instant: what
// the others say, how soon, and what is left behind. This program run again
// with kProgram set is a rank.
//
//   kill_test [--seeds=20] [--first_seed=0] [--axes=0] [--moving_clock=0]
//       [--forks=2] [--closed=3]
//
// With --axes=1 two ranks of a model share its layers, as stages of a pipeline
// or as parts of tensors, or its sequences. The last three are those of
// kill_options.h.
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/env.h"
#include "base/monotonic.h"
#include "base/status_matchers.h"
#include "base/thread/deadline.h"
#include "base/thread/monotonic_wait.h"
#include "comm/launch/launcher.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/failure/kill_options.h"
#include "tests/failure/kill_ranks.h"
#include "tests/failure/moved_clock.h"
#include "tests/support/fork_server.h"
#include "tests/support/temp_folder.h"
#include "third_party/gtest/run_and_exit.h"

namespace tessera {
namespace {

using ::testing::ContainsRegex;

#if __has_feature(address_sanitizer)
constexpr absl::Duration kSurvivorsEnd = absl::Seconds(10);  // all is slower
#else
constexpr absl::Duration kSurvivorsEnd = absl::Seconds(2);
#endif

int g_seeds = 20;
int g_first_seed = 0;
int g_axes = 0;
Hardships g_hardships;

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
  int tensor = 1, pipeline = 1, sequence = 1;
  char phase;
  absl::Duration delay;
  bool rank0_hosts;
  bool clock_moves;
  bool forks;
  bool is_closed;

  std::string ToText() const {
    return absl::StrCat("stage ", stage, ", tensor ", tensor, ", pipeline ",
                        pipeline, ", sequence ", sequence, ", ", world_size,
                        " ranks, rank ", victim, " in phase ",
                        std::string(1, phase), " number ", times, " after ",
                        absl::FormatDuration(delay),
                        rank0_hosts ? ", rank 0 hosts the store" : "",
                        forks ? ", with children" : "",
                        is_closed ? ", without descriptors" : "",
                        clock_moves ? ", the clock is set" : "");
  }
};

Plan PlanOf(int seed) {
  SeededDraw draw(seed);
  const auto up_to = [&](int n) { return static_cast<int>(draw.UpTo(n)); };
  Plan plan;
  plan.stage = seed % 4;
  plan.world_size = g_axes > 0 ? 2 + seed / 4 % 2 * 2 : 2 + seed / 4 % 3;
  int* const axes[] = {&plan.tensor, &plan.pipeline, &plan.sequence};
  if (g_axes > 0) *axes[seed % 3] = 2;
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
  plan.clock_moves = draw.IsOneOf(g_hardships.moving_clock);
  plan.forks = draw.IsOneOf(g_hardships.forks);
  plan.is_closed = draw.IsOneOf(g_hardships.closed);
  return plan;
}

TEST(KillTest, TheSurvivorsEndSoonAndNameTheDead) {
  absl::Duration longest;
  for (int seed = g_first_seed; seed < g_first_seed + g_seeds; ++seed) {
    const Plan plan = PlanOf(seed);
    SCOPED_TRACE(absl::StrCat("seed ", seed, ": ", plan.ToText()));
    KillFolder folder;
    const TempFolder clock_folder;
    MovedClock clock(clock_folder.path() + "/clock");
    RankSpec spec;
    spec.stage = plan.stage;
    spec.tensor = plan.tensor;
    spec.pipeline = plan.pipeline;
    spec.sequence = plan.sequence;
    spec.forks = plan.forks;
    spec.is_closed = plan.is_closed;
    spec.folder = folder.path();
    if (plan.clock_moves) {
      spec.clock = clock_folder.path() + "/clock";
      clock.KeepMoving(seed);
    }
    uint16_t port = 0;
    {
      KillRanks ranks(plan.world_size, plan.victim, spec, plan.rank0_hosts);
      port = ranks.port();
      ASSERT_TRUE(ranks.WaitForPhase(plan.victim, plan.phase, plan.times));
      absl::SleepFor(plan.delay);
      const absl::Duration killed = MonotonicNow();
      kill(ranks[plan.victim].pid, SIGKILL);
      EXPECT_TRUE(ranks.WaitUntilEnded(Deadline::After(absl::Seconds(20)), -1));
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
      // Nor do its children listen in its place.
      EXPECT_FALSE(plan.rank0_hosts && IsListening(port));
    }
    for (const std::string& name : folder.Names()) {
      EXPECT_THAT(name, testing::StartsWith("state"));
    }
    EXPECT_FALSE(IsListening(port));
  }
  std::printf("%d seeds; the slowest survivor took %s\n", g_seeds,
              absl::FormatDuration(longest).c_str());
}

// ---- while the host's clock is set ----

// What the other tests rest on, and why waits are not absl's.
TEST(MovedClockTest, AbslsTimedWaitsFollowTheClockAndOursDoNot) {
  const TempFolder folder;
  MovedClock clock(folder.path() + "/clock");
  FollowMovedClock(folder.path() + "/clock");
  const absl::Time before = absl::Now();
  clock.Move(absl::Hours(24));
  EXPECT_GT(absl::Now() - before, absl::Hours(23));
  EXPECT_GT(absl::FromChrono(std::chrono::system_clock::now()) - before,
            absl::Hours(23));
  EXPECT_GT(absl::FromTimeT(time(nullptr)) - before, absl::Hours(23));

  // A wait of an hour ends when the clock is set forward by two.
  absl::Mutex mutex;
  MonotonicMutex own_mutex;
  bool never = false, own_ends = false;
  std::atomic<bool> over{false};
  std::thread absls([&] {
    absl::MutexLock lock(&mutex);
    EXPECT_FALSE(
        mutex.AwaitWithTimeout(absl::Condition(&never), absl::Hours(1)));
    over = true;
  });
  std::thread ours([&] {
    MonotonicMutexLock lock(&own_mutex);
    EXPECT_TRUE(own_mutex.AwaitFor(absl::Condition(&own_ends), absl::Hours(1)));
  });
  while (!over) {
    clock.Move(absl::Hours(2));
    absl::SleepFor(absl::Milliseconds(5));
  }
  absls.join();
  {
    MonotonicMutexLock lock(&own_mutex);
    own_ends = true;
  }
  ours.join();

  // Set back again and again, ours comes to its end.
  over = false;
  std::thread short_one([&] {
    MonotonicMutexLock lock(&own_mutex);
    EXPECT_FALSE(
        own_mutex.AwaitFor(absl::Condition(&never), absl::Milliseconds(50)));
    EXPECT_FALSE(MonotonicNotification().WaitFor(absl::Milliseconds(50)));
    over = true;
  });
  for (int i = 0; i < 2000 && !over; ++i) {
    clock.Move(-absl::Hours(2));
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_TRUE(over);
  while (!over) {
    clock.Move(absl::Hours(4));
    absl::SleepFor(absl::Milliseconds(5));
  }
  short_one.join();
  FollowMovedClock("");
}

// One of them is long in coming.
TEST(MovedClockTest, RanksMeetAllTheSame) {
  for (const bool rank0_hosts : {false, true}) {
    SCOPED_TRACE(rank0_hosts);
    const KillFolder folder;
    const TempFolder clock_folder;
    MovedClock clock(clock_folder.path() + "/clock");
    RankSpec spec;
    spec.marks = true;
    spec.folder = folder.path();
    spec.clock = clock_folder.path() + "/clock";
    KillRanks ranks(2, /*victim=*/1, spec, rank0_hosts);
    ASSERT_TRUE(ranks.WaitForPhase(1, 'I', 1));
    kill(ranks[1].pid, SIGSTOP);
    ASSERT_TRUE(ranks.WaitForPhase(0, 'I', 1));
    for (int i = 0; i < 10; ++i) {
      clock.Move(absl::Hours(2));
      absl::SleepFor(absl::Milliseconds(50));
    }
    kill(ranks[1].pid, SIGCONT);
    for (const int r : {0, 1}) {
      const bool trains = ranks.WaitForPhase(r, 'F', 1);
      EXPECT_TRUE(trains);
      if (trains) continue;
      ranks.WaitUntilEnded(Deadline::After(absl::Seconds(20)), 1 - r);
      ADD_FAILURE() << "rank " << r << " wrote\n" << ranks[r].words;
      break;
    }
  }
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  using namespace tessera;  // NOLINT
  ServeForks(kProgram, &argc, &argv);
  const std::optional<std::string> rank = EnvString(kProgram);
  if (rank.has_value()) ExitAtOnce(RunRank(*rank, argc, argv));
  testing::InitGoogleTest(&argc, argv);
  if (!ReadNumbers(argc, argv,
                   {{"--seeds", &g_seeds},
                    {"--first_seed", &g_first_seed},
                    {"--axes", &g_axes},
                    {"--moving_clock", &g_hardships.moving_clock},
                    {"--forks", &g_hardships.forks},
                    {"--closed", &g_hardships.closed}})) {
    return 2;
  }
  RunTestsAndExit();
}
