// Checkpoints that are being saved, in real processes, when one rank is killed,
// or all are: before a call to the file system that is chosen at random, or at
// any instant. Found is then the old one or the new one, whole; the survivors
// have ended soon and named the dead; the next save sweeps what is left.
//
//   checkpoint_kill_test [--kills=40] [--first_seed=0] [--jobs=6]
//       [--resume_every=4] [--moving_clock=0] [--forks=2] [--closed=3]
//
// After every fourth kill the same ranks load what is there, train and save.
// Of N kills about N / `moving_clock` have a host whose clock is set again and
// again, N / `forks` ranks with children that outlive them, N / `closed` ranks
// that start without descriptors 0, 1 and 2; 0: none.
//
// This program forked with kProgram set is a rank.
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <thread>
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
#include "comm/launch/launcher.h"
#include "comm/launch/subprocess.h"
#include "comm/rendezvous/hosted_store.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/failure/killing_calls.h"
#include "tests/failure/moved_clock.h"
#include "tests/support/fork_server.h"
#include "tests/support/temp_folder.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr char kProgram[] = "TESSERA_CHECKPOINT_KILL_TEST_RANK";
// How soon survivors end. Not a speed: a bound of the machine's scheduling on
// what takes a second at most.
constexpr absl::Duration kSurvivorsEnd = absl::Seconds(15);

int g_kills = 40;
int g_first_seed = 0;
int g_jobs = 6;
int g_resume_every = 4;
int g_moving_clock = 0;
int g_forks = 2;
int g_closed = 3;

// ---- the program of a rank ----

// Saves the state of step 1, and then of step 2 in its place; "first": only the
// former. While it saves the latter rank `victim` is killed.
struct Plan {
  std::string dir;
  int world_size = 2;
  int stage = 3;
  bool async = false;
  int saves = 2;          // of steps 1, 2, ...
  int armed = 2;          // during which of them is killed
  int victim = -1;        // -1: nobody
  bool all = false;       // the others are killed with it
  int64_t at_call = -1;   // before this one; -1: after
  int64_t after_us = -1;  // so long
  int64_t bandwidth = 0;
  bool loads = false;  // what is there, and goes on from its step
  // Each rank has children, forked in the middle of the armed save, that
  // outlive it.
  bool forks = false;
  bool is_closed = false;  // the ranks have no descriptors 0, 1 and 2 at Init
  bool clock_moves = false;
  std::string clock;  // the one that the ranks follow (moved_clock.h)

  std::string ToText() const {
    return absl::StrCat(dir, " ", world_size, " ", stage, " ", async, " ",
                        saves, " ", armed, " ", victim, " ", all, " ", at_call,
                        " ", after_us, " ", bandwidth, " ", loads, " ", forks,
                        " ", is_closed, " ", clock);
  }
  static Plan FromText(const std::string& text) {
    Plan plan;
    std::istringstream(text) >> plan.dir >> plan.world_size >> plan.stage >>
        plan.async >> plan.saves >> plan.armed >> plan.victim >> plan.all >>
        plan.at_call >> plan.after_us >> plan.bandwidth >> plan.loads >>
        plan.forks >> plan.is_closed >> plan.clock;
    return plan;
  }
};

void Arm(const Plan& plan) {
  CountCalls({plan.at_call, kKill, plan.dir});
  if (plan.after_us < 0) return;
  std::thread([us = plan.after_us] {
    usleep(static_cast<useconds_t>(us));
    raise(SIGKILL);
  }).detach();
}

// Children that end once nobody has the other end of their socket.
void ForkThree() {
  for (int i = 0; i < 3; ++i) {
    if (fork() == 0) {
      char byte = 0;
      while (read(ForkServer::kSocket, &byte, 1) != 0) {
      }
      _exit(0);
    }
    usleep(2000);
  }
}

int g_words_fd = STDERR_FILENO;

void Say(const std::string& line) { dprintf(g_words_fd, "%s\n", line.c_str()); }

void CloseStandardDescriptors() {
  g_words_fd = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 100);
  for (const int fd : {0, 1, 2}) close(fd);
}

// "saved <step>" for each save that has ended well, "refused <step>: <why>"
// where another job was faster, "<calls> calls" of the armed one.
absl::Status TrainAndSave(const Plan& plan, int argc, char** argv) {
  WorldOptions options;
  options.backend = "shm";
  TESSERA_ASSIGN_OR_RETURN(const World* world, Init(&argc, argv, options));
  auto model = BuildModel("Mlp", world->rank());
  TrainingSpec spec;
  spec.stage = plan.stage;
  proto::Config config = ConfigOf(spec);
  config.mutable_checkpoint()->set_max_bandwidth(plan.bandwidth);
  TESSERA_ASSIGN_OR_RETURN(auto engine, Engine::Create(model, config));
  Record record;
  int step = 1;
  if (plan.loads) {
    TESSERA_RETURN_IF_ERROR(engine->LoadCheckpoint(plan.dir).status());
    step = static_cast<int>(engine->step()) + 1;
  }
  for (; step <= plan.saves; ++step) {
    spec.steps = step;
    TESSERA_RETURN_IF_ERROR(
        TrainSteps(*engine, *model, spec, world->rank(), step - 1, &record));
    if (plan.is_closed) dprintf(STDOUT_FILENO, "step %d\n", step);
    const bool armed = step == plan.armed;
    if (armed && world->rank() == plan.victim) Arm(plan);
    if (armed && plan.victim < 0) CountCalls({-1, kKill, plan.dir});
    std::thread forker;
    if (armed && plan.forks) forker = std::thread(ForkThree);
    SaveOptions save;
    save.async = plan.async;
    absl::Status saved = engine->SaveCheckpoint(plan.dir, "", save);
    if (forker.joinable()) forker.join();
    if (saved.ok() && plan.async) {
      if (step == plan.saves) {  // training goes on beside it
        ++spec.steps;
        TESSERA_RETURN_IF_ERROR(
            TrainSteps(*engine, *model, spec, world->rank(), step, &record));
      }
      saved = engine->WaitForCheckpoint();
    }
    if (armed) Say(absl::StrCat(StopCountingCalls(), " calls"));
    if (absl::IsUnavailable(saved) &&
        absl::StrContains(saved.message(), "another process is saving")) {
      Say(absl::StrCat("refused ", step));
      continue;
    }
    TESSERA_RETURN_IF_ERROR(saved);
    Say(absl::StrCat("saved ", step));
  }
  return absl::OkStatus();
}

int RankMain(const std::string& text, int argc, char** argv) {
  const Plan plan = Plan::FromText(text);
  FollowMovedClock(plan.clock);
  if (plan.is_closed) CloseStandardDescriptors();
  const absl::Status status = TrainAndSave(plan, argc, argv);
  if (!status.ok()) Say(absl::StrCat("failed: ", status.ToString()));
  Shutdown();
  return status.ok() ? 0 : 1;
}

// ---- the test ----

// As /proc names it, which is how calls on what lies in it are known.
std::string DirIn(const TempFolder& folder) {
  return std::filesystem::canonical(folder.path()).string() + "/ckpt";
}

// The ranks of one job, as forks.
class Job {
 public:
  explicit Job(const Plan& plan)
      : plan_(plan), store_(HostedStore::Start(plan.world_size).value()) {
    ForkServer* const server = ForkServer::Get().value();
    TESSERA_CHECK(pipe2(hold_, O_CLOEXEC) == 0);
    for (int r = 0; r < plan.world_size; ++r) {
      Environment env =
          LocalRankEnvironment(r, plan.world_size, store_.Environment());
      env.emplace_back(kProgram, plan.ToText());
      int pipe[2];
      TESSERA_CHECK(pipe2(pipe, O_CLOEXEC) == 0);
      fcntl(pipe[0], F_SETFL, O_NONBLOCK);
      const pid_t pid = server->Fork(env, pipe[1], hold_[0]).value();
      close(pipe[1]);
      ranks_.push_back({pid, pipe[0]});
    }
  }
  ~Job() {
    for (Rank& rank : ranks_) {
      if (rank.pid != 0) {
        kill(rank.pid, SIGKILL);
        waitpid(rank.pid, nullptr, 0);
      }
      close(rank.output);
    }
    for (int fd : hold_) close(fd);  // ends the ranks' children
    while (waitpid(-1, nullptr, WNOHANG) > 0) {
    }
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  // True once all have ended. Kills the rest with the victim if that is so.
  bool HasEnded() {
    bool all = true;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      Rank& rank = ranks_[r];
      char buffer[4096];
      for (ssize_t got;
           (got = read(rank.output, buffer, sizeof(buffer))) > 0;) {
        rank.words.append(buffer, static_cast<size_t>(got));
      }
      if (rank.pid == 0) continue;
      if (waitpid(rank.pid, &rank.wait_status, WNOHANG) != rank.pid) {
        all = false;
        continue;
      }
      rank.pid = 0;
      all = false;  // once more, for its words
      if (WIFSIGNALED(rank.wait_status) && !died_.has_value()) {
        died_ = MonotonicNow();
        for (Rank& other : ranks_) {
          if (plan_.all && other.pid != 0) kill(other.pid, SIGKILL);
        }
      }
      store_.Fail(absl::StrCat("rank ", r, " ", DescribeExit(rank.wait_status),
                               " before the job had started"));
    }
    return all;
  }
  // Waits for it; false if survivors have not ended in time.
  bool Wait() {
    const absl::Duration start = MonotonicNow();
    while (!HasEnded()) {
      const absl::Duration from = died_.value_or(start + absl::Seconds(60));
      if (MonotonicNow() > from + kSurvivorsEnd) return false;
      absl::SleepFor(absl::Milliseconds(1));
    }
    return true;
  }

  const std::string& words(int rank) const {
    return ranks_[static_cast<size_t>(rank)].words;
  }
  bool killed(int rank) const {
    return WIFSIGNALED(ranks_[static_cast<size_t>(rank)].wait_status);
  }
  std::string AllWords() const {
    std::string all;
    for (const Rank& rank : ranks_) {
      absl::StrAppend(&all, DescribeExit(rank.wait_status), ":\n", rank.words);
    }
    return all;
  }

 private:
  struct Rank {
    pid_t pid = 0;  // 0: has ended
    int output = -1;
    int wait_status = 0;
    std::string words;
  };
  const Plan plan_;
  int hold_[2];
  HostedStore store_;
  std::vector<Rank> ranks_;
  std::optional<absl::Duration> died_;
};

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

// The states after steps 1 to 3 of a job that nobody kills, the calls of its
// second save, by rank.
struct Undisturbed {
  std::map<int64_t, std::map<std::string, std::string>> values;
  std::vector<int64_t> calls;
};

const Undisturbed& UndisturbedBy(int world_size, int stage) {
  static auto* all = new std::map<std::pair<int, int>, Undisturbed>();
  auto [it, is_new] = all->try_emplace({world_size, stage});
  if (!is_new) return it->second;
  Undisturbed& found = it->second;
  for (int saves = 1; saves <= 3; ++saves) {
    const TempFolder folder;
    Plan plan;
    plan.dir = DirIn(folder);
    plan.world_size = world_size;
    plan.stage = stage;
    plan.saves = saves;
    Job job(plan);
    TESSERA_CHECK(job.Wait()) << job.AllWords();
    int64_t step = 0;
    found.values[saves] = ValuesIn(plan.dir, &step).value();
    TESSERA_CHECK(step == saves) << job.AllWords();
    if (saves != 2) continue;
    for (int r = 0; r < world_size; ++r) {
      int64_t calls = -1;
      for (absl::string_view line : absl::StrSplit(job.words(r), '\n')) {
        if (absl::ConsumeSuffix(&line, " calls")) {
          TESSERA_CHECK(absl::SimpleAtoi(line, &calls));
        }
      }
      TESSERA_CHECK(calls > 2) << job.AllWords();
      found.calls.push_back(calls);
    }
  }
  return found;
}

Plan PlanOf(int seed, const std::string& dir) {
  std::mt19937 random(static_cast<unsigned>(seed));
  const auto up_to = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  Plan plan;
  plan.dir = dir;
  plan.world_size = 2 + seed % 2;
  plan.stage = seed / 2 % 2 == 0 ? 3 : 0;
  plan.async = seed / 4 % 2 == 1;
  plan.victim = static_cast<int>(up_to(plan.world_size));
  plan.all = up_to(4) == 0;
  const auto is_one_of = [&](int n) {
    return up_to(std::max(n, 1)) == 0 && n > 0;
  };
  plan.clock_moves = is_one_of(g_moving_clock);
  plan.forks = is_one_of(g_forks);
  plan.is_closed = is_one_of(g_closed);
  if (up_to(4) == 0) {
    plan.bandwidth = 200'000;  // some 50 ms
    plan.after_us = up_to(120'000);
  } else {
    const Undisturbed& calm = UndisturbedBy(plan.world_size, plan.stage);
    plan.at_call = up_to(calm.calls[static_cast<size_t>(plan.victim)] + 1);
  }
  return plan;
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
  const Undisturbed& calm = UndisturbedBy(plan.world_size, plan.stage);
  EXPECT_TRUE(*values == calm.values.at(step)) << "values of another step";
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
    Job job(plan);
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
      Job job(next);
      EXPECT_TRUE(job.Wait()) << job.AllWords();
      for (int r = 0; r < plan.world_size; ++r) {
        EXPECT_THAT(job.words(r), HasSubstr(absl::StrCat("saved ", step + 1)));
      }
      EXPECT_EQ(StepFound(plan), step + 1);
    } else {
      // The next save begins by sweeping.
      TESSERA_EXPECT_OK(Saving::Begin(plan.dir, FileSystem::Real()).status());
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
    const Undisturbed& calm = UndisturbedBy(plan.world_size, plan.stage);
    killed.victim = static_cast<int>(random() % 2);
    killed.armed = 1 + static_cast<int>(random() % 3);
    killed.at_call = static_cast<int64_t>(random()) % calm.calls[0];
    killed.all = true;
    SCOPED_TRACE(absl::StrCat("seed ", seed, ": ", killed.ToText()));
    Job one(plan), other(killed);
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
      EXPECT_TRUE(*values == calm.values.at(step));
    }
    EXPECT_FALSE(absl::StrContains(one.AllWords(), "failed")) << one.AllWords();
    TESSERA_EXPECT_OK(Saving::Begin(plan.dir, FileSystem::Real()).status());
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
  ServeForks();
  const std::optional<std::string> program = EnvString(kProgram);
  if (program.has_value()) return RankMain(*program, argc, argv);
  testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    absl::string_view arg = argv[i];
    int* const value =
        absl::ConsumePrefix(&arg, "--kills=")          ? &g_kills
        : absl::ConsumePrefix(&arg, "--first_seed=")   ? &g_first_seed
        : absl::ConsumePrefix(&arg, "--resume_every=") ? &g_resume_every
        : absl::ConsumePrefix(&arg, "--moving_clock=") ? &g_moving_clock
        : absl::ConsumePrefix(&arg, "--forks=")        ? &g_forks
        : absl::ConsumePrefix(&arg, "--closed=")       ? &g_closed
        : absl::ConsumePrefix(&arg, "--jobs=")         ? &g_jobs
                                                       : nullptr;
    if (value == nullptr || !absl::SimpleAtoi(arg, value)) {
      std::fprintf(stderr, "unknown argument %s\n", argv[i]);
      return 2;
    }
  }
  return RUN_ALL_TESTS();
}
