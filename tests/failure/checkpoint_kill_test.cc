// Checkpoints that are being saved, in real processes, when one rank is killed,
// or all are: before a call to the file system that is chosen at random, or at
// any instant. Found is then the old one or the new one, whole; the survivors
// have ended soon and named the dead; the next save sweeps what is left.
//
//   checkpoint_kill_test [--kills=20] [--first_seed=0] [--jobs=6]
//       [--resume_every=4] [--moving_clock=0] [--forks=2] [--closed=3]
//
// After every fourth kill the same ranks load what is there, train and save.
// The last three are those of kill_options.h.
//
// This program forked with kProgram set is a rank (checkpoint_kill_ranks.h).

#include <cstdio>
#include <filesystem>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/env.h"
#include "base/monotonic.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "checkpoint/format/checkpoint_reader.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/failure/checkpoint_kill_ranks.h"
#include "tests/failure/kill_options.h"
#include "tests/failure/moved_clock.h"
#include "tests/support/fork_server.h"
#include "tests/support/temp_folder.h"
#include "third_party/gtest/run_and_exit.h"

namespace tessera {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

int g_kills = 20;
int g_first_seed = 0;
int g_jobs = 6;
int g_resume_every = 4;
Hardships g_hardships;

// As /proc names it, which is how calls on what lies in it are known.
std::string DirIn(const TempFolder& folder) {
  return std::filesystem::canonical(folder.path()).string() + "/ckpt";
}

// Of all bytes of all states, by name; or the error.
absl::StatusOr<std::map<std::string, std::string>> ValuesIn(
    const std::string& dir, int64_t* step) {
  TESSERA_ASSIGN_OR_RETURN(CheckpointReader reader,
                           CheckpointReader::Open(dir, FileSystem::Real()));
  TESSERA_RETURN_IF_ERROR(reader.Verify(1));
  *step = reader.manifest().step();
  std::map<std::string, std::string> values;
  for (int s = 0; s < reader.manifest().storages_size(); ++s) {
    const auto& storage = reader.manifest().storages(s);
    for (int i = 0; i < storage.states_size(); ++i) {
      std::string& bytes =
          values[absl::StrCat(storage.tensors(0).name(), " ", i)];
      bytes.resize(static_cast<size_t>(storage.numel()) * sizeof(float));
      TESSERA_RETURN_IF_ERROR(
          reader.Read({{s, i, 0, storage.numel(), bytes.data()}}, 1));
    }
  }
  return values;
}

// What a job leaves that nobody kills: the states after its last save, and the
// calls of its second save, by rank.
struct Undisturbed {
  std::map<std::string, std::string> values;
  std::vector<int64_t> calls;
};

const Undisturbed& UndisturbedBy(int world_size, int stage, int saves) {
  static auto* all = new std::map<std::tuple<int, int, int>, Undisturbed>();
  auto [it, is_new] =
      all->try_emplace(std::make_tuple(world_size, stage, saves));
  if (!is_new) return it->second;
  Undisturbed& found = it->second;
  const TempFolder folder;
  Plan plan;
  plan.dir = DirIn(folder);
  plan.world_size = world_size;
  plan.stage = stage;
  plan.saves = saves;
  KillJob job(plan);
  TESSERA_CHECK(job.Wait()) << job.AllWords();
  int64_t step = 0;
  found.values = ValuesIn(plan.dir, &step).value();
  TESSERA_CHECK(step == saves) << job.AllWords();
  for (int r = 0; saves >= 2 && r < world_size; ++r) {
    int64_t calls = -1;
    for (absl::string_view line : absl::StrSplit(job.words(r), '\n')) {
      if (absl::ConsumeSuffix(&line, " calls")) {
        TESSERA_CHECK(absl::SimpleAtoi(line, &calls));
      }
    }
    TESSERA_CHECK(calls > 2) << job.AllWords();
    found.calls.push_back(calls);
  }
  return found;
}
const Undisturbed& UndisturbedBy(const Plan& plan, int64_t saves) {
  return UndisturbedBy(plan.world_size, plan.stage, static_cast<int>(saves));
}

Plan PlanOf(int seed, const std::string& dir) {
  SeededDraw draw(seed);
  Plan plan;
  plan.dir = dir;
  plan.world_size = 2 + seed % 2;
  plan.stage = seed / 2 % 2 == 0 ? 3 : 0;
  plan.async = seed / 4 % 2 == 1;
  plan.victim = static_cast<int>(draw.UpTo(plan.world_size));
  plan.all = draw.UpTo(4) == 0;
  plan.clock_moves = draw.IsOneOf(g_hardships.moving_clock);
  plan.forks = draw.IsOneOf(g_hardships.forks);
  plan.is_closed = draw.IsOneOf(g_hardships.closed);
  if (draw.UpTo(4) == 0) {
    plan.bandwidth = 200'000;  // some 50 ms
    plan.after_us = draw.UpTo(120'000);
  } else {
    const Undisturbed& calm = UndisturbedBy(plan, 2);
    plan.at_call = draw.UpTo(calm.calls[static_cast<size_t>(plan.victim)] + 1);
  }
  return plan;
}

// A child whose parent is killed within fork() has the parent's lock until it
// runs and closes it (base/system/close_on_fork.h). Waits for such children.
absl::Status BeginNextSave(const std::string& dir) {
  const absl::Duration deadline = MonotonicNow() + absl::Seconds(60);
  while (true) {
    const absl::Status begun = Saving::Begin(dir, FileSystem::Real()).status();
    if (!absl::IsUnavailable(begun) || MonotonicNow() > deadline) return begun;
    absl::SleepFor(absl::Milliseconds(1));
  }
}

// The step of the checkpoint there, which is whole and has that step's values;
// -1 with a failure.
int64_t StepFound(const Plan& plan) {
  int64_t step = -1;
  const auto values = ValuesIn(plan.dir, &step);
  if (!values.ok()) {
    ADD_FAILURE() << values.status();
    return -1;
  }
  EXPECT_TRUE(*values == UndisturbedBy(plan, step).values)
      << "values of another step";
  return step;
}

TEST(CheckpointKillTest, TheOldOneOrTheNewOneIsFoundWhole) {
  int olds = 0, news = 0, survivors_failed = 0;
  for (int seed = g_first_seed; seed < g_first_seed + g_kills; ++seed) {
    const TempFolder folder, clock_folder;
    Plan plan = PlanOf(seed, DirIn(folder));
    MovedClock clock(clock_folder.path() + "/clock");
    if (plan.clock_moves) {
      plan.clock = clock_folder.path() + "/clock";
      clock.KeepMoving(seed);
    }
    SCOPED_TRACE(absl::StrCat("seed ", seed, ": ", plan.ToText()));
    KillJob job(plan);
    EXPECT_TRUE(job.Wait()) << "survivors hang\n" << job.AllWords();
    const int64_t step = StepFound(plan);
    EXPECT_TRUE(step == 1 || step == 2) << job.AllWords();
    ++(step == 1 ? olds : news);
    for (int r = 0; r < plan.world_size; ++r) {
      const std::string& words = job.words(r);
      // Who says that it is saved is right.
      if (absl::StrContains(words, "saved 2")) EXPECT_EQ(step, 2) << words;
      if (job.killed(r) || !job.killed(plan.victim)) continue;
      if (!absl::StrContains(words, "failed: ")) continue;
      ++survivors_failed;
      EXPECT_THAT(words, HasSubstr(absl::StrCat("rank ", plan.victim)));
    }
    if (seed % g_resume_every == 0) {
      Plan next;
      next.dir = plan.dir;
      next.world_size = plan.world_size;
      next.stage = plan.stage;
      next.loads = true;
      next.clock = plan.clock;
      next.saves = static_cast<int>(step) + 1;
      next.armed = 0;
      KillJob job(next);
      EXPECT_TRUE(job.Wait()) << job.AllWords();
      for (int r = 0; r < plan.world_size; ++r) {
        EXPECT_THAT(job.words(r), HasSubstr(absl::StrCat("saved ", step + 1)));
      }
      EXPECT_EQ(StepFound(plan), step + 1);
    } else {
      // The next save begins by sweeping.
      TESSERA_EXPECT_OK(BeginNextSave(plan.dir));
      EXPECT_EQ(StepFound(plan), step);
    }
    size_t files = 0;
    for (const auto& entry : std::filesystem::directory_iterator(plan.dir)) {
      (void)entry;
      ++files;
    }
    EXPECT_EQ(files, static_cast<size_t>(plan.world_size) + 2);
    if (::testing::Test::HasFailure()) break;
  }
  std::printf("%d kills: %d old, %d new, %d survivors failed\n", g_kills, olds,
              news, survivors_failed);
  if (g_kills >= 20) {
    EXPECT_GT(olds, 0);
    EXPECT_GT(news, 0);
  }
}

// Two jobs that save to one folder, one of them killed at some call: who opens
// it meanwhile finds one checkpoint, or is told that it was replaced.
TEST(CheckpointKillTest, TwoJobsInOneFolder) {
  int looks = 0, saved = 0;
  for (int seed = g_first_seed; seed < g_first_seed + g_jobs; ++seed) {
    const TempFolder folder;
    Plan plan;
    plan.dir = DirIn(folder);
    plan.saves = 3;
    Plan killed = plan;
    std::mt19937 random(static_cast<unsigned>(seed));
    // All are known before the two begin.
    for (int saves = 1; saves <= plan.saves; ++saves) {
      UndisturbedBy(plan, saves);
    }
    const Undisturbed& calm = UndisturbedBy(plan, 2);
    killed.victim = static_cast<int>(random() % 2);
    killed.armed = 1 + static_cast<int>(random() % 3);
    killed.at_call = static_cast<int64_t>(random()) % calm.calls[0];
    killed.all = true;
    SCOPED_TRACE(absl::StrCat("seed ", seed, ": ", killed.ToText()));
    KillJob one(plan), other(killed);
    int64_t last = 0;
    for (bool over = false; !over;) {
      const bool first = one.HasEnded(), second = other.HasEnded();
      over = first && second;
      int64_t step = 0;
      const auto values = ValuesIn(plan.dir, &step);
      ++looks;
      if (!values.ok()) {
        EXPECT_TRUE(absl::IsAborted(values.status()) ||
                    (last == 0 && absl::IsNotFound(values.status())))
            << values.status();
        continue;
      }
      last = step;
      EXPECT_TRUE(*values == UndisturbedBy(plan, step).values);
    }
    EXPECT_FALSE(absl::StrContains(one.AllWords(), "failed")) << one.AllWords();
    TESSERA_EXPECT_OK(BeginNextSave(plan.dir));
    // All saves of the one may have been refused, and the other killed in its
    // first.
    const std::string words = one.AllWords() + other.AllWords();
    if (last > 0 || absl::StrContains(words, "saved ")) {
      EXPECT_GT(StepFound(plan), 0) << words;
      ++saved;
    }
    if (::testing::Test::HasFailure()) break;
  }
  EXPECT_GT(looks, g_jobs);
  EXPECT_GT(saved, 0);
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  using namespace tessera;  // NOLINT
  ServeForks(kProgram, &argc, &argv);
  const std::optional<std::string> program = EnvString(kProgram);
  if (program.has_value()) ExitAtOnce(RankMain(*program, argc, argv));
  testing::InitGoogleTest(&argc, argv);
  if (!ReadNumbers(argc, argv,
                   {{"--kills", &g_kills},
                    {"--first_seed", &g_first_seed},
                    {"--resume_every", &g_resume_every},
                    {"--jobs", &g_jobs},
                    {"--moving_clock", &g_hardships.moving_clock},
                    {"--forks", &g_hardships.forks},
                    {"--closed", &g_hardships.closed}})) {
    return 2;
  }
  RunTestsAndExit();
}
