// Ranks that save checkpoints, one of which is killed meanwhile, and their
// launcher, for checkpoint_kill_test.cc.
#ifndef TESTS_FAILURE_CHECKPOINT_KILL_RANKS_H_
#define TESTS_FAILURE_CHECKPOINT_KILL_RANKS_H_

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdio>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/check.h"
#include "base/monotonic.h"
#include "base/status.h"
#include "comm/launch/launcher.h"
#include "comm/launch/subprocess.h"
#include "comm/rendezvous/hosted_store.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "tests/failure/killing_calls.h"
#include "tests/failure/moved_clock.h"
#include "tests/support/fork_server.h"
#include "tests/support/training.h"

namespace tessera {

// A fork of the test's program with this set in its environment is a rank: of
// this Plan.
// A rank's descriptor that ends its children.
inline constexpr int kHold = 3;
inline constexpr char kProgram[] = "TESSERA_CHECKPOINT_KILL_TEST_RANK";
// How soon survivors end. Not a speed: a bound of the machine's scheduling on
// what takes a second at most.
inline constexpr absl::Duration kSurvivorsEnd = absl::Seconds(15);

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

inline void Arm(const Plan& plan) {
  CountCalls({plan.at_call, kKill, plan.dir});
  if (plan.after_us < 0) return;
  std::thread([us = plan.after_us] {
    usleep(static_cast<useconds_t>(us));
    raise(SIGKILL);
  }).detach();
}

// Children that end once nobody has the other end of their socket.
inline void ForkThree() {
  for (int i = 0; i < 3; ++i) {
    if (fork() == 0) {
      char byte = 0;
      while (read(kHold, &byte, 1) != 0) {
      }
      _exit(0);
    }
    usleep(2000);
  }
}

inline int g_words_fd = STDERR_FILENO;

inline void Say(const std::string& line) {
  dprintf(g_words_fd, "%s\n", line.c_str());
}

inline void CloseStandardDescriptors() {
  g_words_fd = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 100);
  for (const int fd : {0, 1, 2}) close(fd);
}

// "saved <step>" for each save that has ended well, "refused <step>: <why>"
// where another job was faster, "<calls> calls" of the armed one.
inline absl::Status TrainAndSave(const Plan& plan, int argc, char** argv) {
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

inline int RankMain(const std::string& text, int argc, char** argv) {
  const Plan plan = Plan::FromText(text);
  FollowMovedClock(plan.clock);
  if (plan.is_closed) CloseStandardDescriptors();
  const absl::Status status = TrainAndSave(plan, argc, argv);
  if (!status.ok()) Say(absl::StrCat("failed: ", status.ToString()));
  Shutdown();
  return status.ok() ? 0 : 1;
}

// The ranks of one job, as forks.
class KillJob {
 public:
  explicit KillJob(const Plan& plan)
      : plan_(plan), store_(HostedStore::Start(plan.world_size).value()) {
    TESSERA_CHECK(pipe2(hold_, O_CLOEXEC) == 0);
    for (int r = 0; r < plan.world_size; ++r) {
      Environment env =
          LocalRankEnvironment(r, plan.world_size, store_.Environment());
      env.emplace_back(kProgram, plan.ToText());
      int pipe[2];
      TESSERA_CHECK(pipe2(pipe, O_CLOEXEC) == 0);
      fcntl(pipe[0], F_SETFL, O_NONBLOCK);
      SelfExecOptions options;
      options.env = std::move(env);
      options.fds = {{pipe[1], STDERR_FILENO}, {hold_[0], kHold}};
      const pid_t pid = ForkSelf(options).value();
      close(pipe[1]);
      ranks_.push_back({pid, pipe[0]});
    }
  }
  ~KillJob() {
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
  KillJob(const KillJob&) = delete;
  KillJob& operator=(const KillJob&) = delete;

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

}  // namespace tessera
#endif  // TESTS_FAILURE_CHECKPOINT_KILL_RANKS_H_
