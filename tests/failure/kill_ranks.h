// Ranks that train until they are ended, in processes of their own, and their
// launcher, for kill_test.cc and stop_test.cc.
#ifndef TESTS_FAILURE_KILL_RANKS_H_
#define TESTS_FAILURE_KILL_RANKS_H_

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <optional>
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
#include "base/env.h"
#include "base/monotonic.h"
#include "base/status.h"
#include "base/thread/deadline.h"
#include "base/torch_guard.h"
#include "comm/launch/launcher.h"
#include "comm/launch/subprocess.h"
#include "comm/rendezvous/hosted_store.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "tests/failure/moved_clock.h"
#include "tests/models/models.h"
#include "tests/support/fork_server.h"
#include "tests/support/process.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/training.h"
#include "torch/torch.h"

namespace tessera {

// Set in the environment of a program that is to be a rank: its RankSpec.
inline constexpr char kProgram[] = "TESSERA_KILL_TEST_RANK";

// The phases, by the byte that the victim writes to stdout as it enters one.
inline constexpr char kPhases[] = "ICFBSK";
//   I  start-up     C  making the engine   F  forward
//   B  reduction    S  step                K  checkpoint

struct RankSpec {
  int stage = 0;
  // Ranks that share a model's layers, or sequences.
  int tensor = 1, pipeline = 1, sequence = 1;
  bool marks = false;  // writes its phases
  bool forks = false;  // has children that outlive it
  // Starts without descriptors 0, 1 and 2, as a daemon may.
  bool is_closed = false;
  absl::Duration timeout = absl::Minutes(5);
  std::string folder;
  std::string clock;  // the one it follows (tests/failure/moved_clock.h)

  std::string ToText() const {
    return absl::StrCat(stage, " ", tensor, " ", pipeline, " ", sequence, " ",
                        marks ? 1 : 0, " ", forks ? 1 : 0, " ",
                        is_closed ? 1 : 0, " ", absl::FormatDuration(timeout),
                        " ", folder, " ", clock);
  }
  static RankSpec FromText(const std::string& text) {
    std::string timeout;
    RankSpec spec;
    std::istringstream(text) >> spec.stage >> spec.tensor >> spec.pipeline >>
        spec.sequence >> spec.marks >> spec.forks >> spec.is_closed >>
        timeout >> spec.folder >> spec.clock;
    absl::ParseDuration(timeout, &spec.timeout);
    return spec;
  }

  // Where a rank waits for the launcher's end, writes its phases, and its
  // words.
  int hold_fd() const { return is_closed ? 100 : STDIN_FILENO; }
  int marks_fd() const { return is_closed ? 101 : STDOUT_FILENO; }
  int words_fd() const { return is_closed ? 102 : STDERR_FILENO; }
};

// As a data loader's worker does: goes on without exec, and does not end with
// its parent, but once nobody has the other end of `hold_fd`.
inline void ForkChild(int hold_fd) {
  if (fork() != 0) return;
  char byte = 0;
  while (read(hold_fd, &byte, 1) != 0) {
  }
  _exit(0);
}

// Trains until it is ended.
inline absl::Status TrainForEver(const RankSpec& spec, int argc, char** argv) {
  auto enter = [&](char phase) {
    if (spec.marks && write(spec.marks_fd(), &phase, 1) != 1) _exit(99);
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
  for (const int fd : {0, 1, 2}) {
    struct stat held;
    if (spec.is_closed && (fstat(fd, &held) != 0 || !S_ISCHR(held.st_mode))) {
      return absl::InternalError(absl::StrCat(fd, " is not /dev/null"));
    }
  }
  if (spec.forks) ForkChild(spec.hold_fd());
  enter('C');
  TrainingSpec training;
  training.stage = spec.stage;
  training.tensor = spec.tensor;
  training.sequence = spec.sequence;
  training.pipeline = spec.pipeline;
  training.accumulation = spec.pipeline;
  const int data_rank = training.DataRank(world->rank(), world->world_size());
  auto model = BuildModel("Mlp", data_rank);
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, training, world->communicator()));
  if (spec.forks) ForkChild(spec.hold_fd());
  for (int64_t step = 0;; ++step) {
    enter('F');
    if (spec.pipeline > 1) {
      TESSERA_RETURN_IF_ERROR(engine
                                  ->BackwardBatch([&](int64_t i) {
                                    const at::Tensor loss =
                                        model->Loss(data_rank, step);
                                    if (i == 1) enter('B');
                                    return loss;
                                  })
                                  .status());
    } else {
      TESSERA_ASSIGN_OR_RETURN(at::Tensor loss, CatchTorch("forward", [&] {
                                 return model->Loss(data_rank, step);
                               }));
      enter('B');
      TESSERA_RETURN_IF_ERROR(engine->Backward(loss));
    }
    enter('S');
    TESSERA_RETURN_IF_ERROR(engine->Step());
    if (step % 3 != 2) continue;
    enter('K');
    // In the middle of the first save.
    std::thread forker;
    if (spec.forks && step == 2) {
      forker = std::thread(ForkChild, spec.hold_fd());
    }
    const absl::Status saved = engine->SaveCheckpoint(spec.folder + "/state");
    if (forker.joinable()) forker.join();
    TESSERA_RETURN_IF_ERROR(saved);
  }
}

inline int RunRank(const std::string& text, int argc, char** argv) {
  const RankSpec spec = RankSpec::FromText(text);
  FollowMovedClock(spec.clock);
  const absl::Status status = TrainForEver(spec, argc, argv);
  Shutdown();
  dprintf(spec.words_fd(), "%s\n", status.ToString().c_str());
  return 1;
}

// A folder that must hold nothing but checkpoints at the end.
class KillFolder : public TempFolder {
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

struct KillRank {
  pid_t pid = 0;
  int out = -1;
  int err = -1;
  std::string words;     // stderr
  absl::Duration ended;  // MonotonicNow()
  int code = 0;

  // The last that the program itself wrote: threads that it left to themselves
  // may go on writing after it, libtorch's in lines that begin with a bracket,
  // ours with a letter and the time.
  std::string LastLine() const {
    std::vector<std::string> lines =
        absl::StrSplit(absl::StripSuffix(words, "\n"), '\n');
    const auto is_log = [](absl::string_view line) {
      return absl::StartsWith(line, "[") || absl::StartsWith(line, "I ") ||
             absl::StartsWith(line, "W ") || absl::StartsWith(line, "E ");
    };
    while (lines.size() > 1 && is_log(lines.back())) lines.pop_back();
    return lines.back();
  }
};

// Ranks, and this process as their launcher: it hosts the store, unless rank 0
// is to, and tells the store who has ended. `victim` writes its phases; all do
// if `spec.marks`.
class KillRanks {
 public:
  KillRanks(int world_size, int victim, const RankSpec& spec,
            bool rank0_hosts = false)
      : ranks_(world_size) {
    if (!rank0_hosts) store_ = HostedStore::Start(world_size).value();
    if (pipe2(hold_, O_CLOEXEC) != 0) abort();
    port_ = rank0_hosts ? static_cast<uint16_t>(FreePort()) : store_->port();
    for (int r = 0; r < world_size; ++r) {
      RankSpec own = spec;
      own.marks |= r == victim;
      Start(r, own);
    }
  }
  ~KillRanks() {
    for (KillRank& rank : ranks_) {
      if (rank.pid != 0) kill(rank.pid, SIGKILL);
    }
    WaitUntilEnded(Deadline::After(absl::Seconds(20)), -1);
    for (KillRank& rank : ranks_) {
      close(rank.out);
      close(rank.err);
    }
    for (int fd : hold_) close(fd);  // ends the ranks' children
  }

  KillRank& operator[](int r) { return ranks_[r]; }
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

  // Reads what `rank` has entered until now.
  void DropPhases(int rank) {
    char entered = 0;
    pollfd fd = {ranks_[rank].out, POLLIN, 0};
    while (poll(&fd, 1, 0) > 0 && read(ranks_[rank].out, &entered, 1) == 1) {
    }
  }

  // Until all but `except` have ended; false if they have not at `deadline`.
  bool WaitUntilEnded(Deadline deadline, int except) {
    while (true) {
      bool all = true;
      for (size_t r = 0; r < ranks_.size(); ++r) {
        Reap(static_cast<int>(r));
        all &= ranks_[r].pid == 0 || static_cast<int>(r) == except;
      }
      if (all || deadline.HasPassed()) return all;
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
    const int world_size = static_cast<int>(ranks_.size());
    if (store_.has_value()) {
      child.env = LocalRankEnvironment(r, world_size, store_->Environment());
    } else {
      child.env = {{"RANK", absl::StrCat(r)},
                   {"WORLD_SIZE", absl::StrCat(world_size)},
                   {"MASTER_ADDR", "127.0.0.1"},
                   {"MASTER_PORT", absl::StrCat(port_)}};
    }
    child.env.emplace_back("OMP_NUM_THREADS", "1");
    child.env.emplace_back("TMPDIR", spec.folder);
    child.env.emplace_back(kProgram, spec.ToText());
    child.fds = {{out[1], spec.marks_fd()},
                 {err[1], spec.words_fd()},
                 {hold_[0], spec.hold_fd()}};
    const int flags = spec.is_closed ? FD_CLOEXEC : 0;
    for (const int fd : {0, 1, 2}) fcntl(fd, F_SETFD, flags);
    // A program finds what is closed as it is executed.
    ranks_[r].pid = (spec.is_closed ? SpawnSelf : ForkSelf)(child).value();
    for (const int fd : {0, 1, 2}) fcntl(fd, F_SETFD, 0);
    close(out[1]);
    close(err[1]);
    ranks_[r].out = out[0];
    ranks_[r].err = err[0];
  }

  void Reap(int r) {
    KillRank& rank = ranks_[r];
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
    rank.ended = MonotonicNow();
    rank.code = ShellExitCode(wait_status);
    if (store_.has_value()) {
      store_->Fail(absl::StrCat("rank ", r, " ", DescribeExit(wait_status),
                                " before the job had started"));
    }
  }

  std::optional<HostedStore> store_;
  int hold_[2];  // the ranks' stdin
  uint16_t port_ = 0;
  std::vector<KillRank> ranks_;
};

}  // namespace tessera
#endif  // TESTS_FAILURE_KILL_RANKS_H_
