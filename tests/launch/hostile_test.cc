// Strangers attack a job while it trains, and while it starts: its losses are
// those of an undisturbed run, nobody is let in, and it does not grow.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "base/thread/deadline.h"
#include "base/torch_guard.h"
#include "comm/connect/handshake.h"
#include "comm/connect/job_secret.h"
#include "comm/connect/sockets.h"
#include "comm/rendezvous/store_server.h"
#include "comm/world/world.h"
#include "config/config.pb.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/launch/attack.h"
#include "tests/launch/two_hosts.h"
#include "tests/support/flag_file.h"
#include "tests/support/fork_server.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"
#include "third_party/gtest/run_and_exit.h"
#include "torch/torch.h"

namespace tessera {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr char kProgram[] = "TESSERA_HOSTILE_TEST_PROGRAM";
constexpr char kFolder[] = "TESSERA_HOSTILE_TEST_FOLDER";  // of flags
constexpr char kBackend[] = "TESSERA_HOSTILE_TEST_BACKEND";
constexpr char kSecret[] = "a secret of this job alone";
constexpr absl::Duration kPatience = absl::Seconds(90);
constexpr int64_t kMaxGrowth = int64_t{16} << 20;
constexpr int kNoReply = 0;
constexpr int kOneAnswer = 48;  // a nonce and a hash

void Print(const std::string& line) {  // one write: lines do not mix
  if (write(STDOUT_FILENO, line.data(), line.size()) < 0) _exit(99);
}

// ---- the program of a rank ----

// 30 steps. Before the 11th it says "pid <its own>" and waits for the flag
// "attacked", before the 21st for "go on"; in the end it prints all losses.
absl::Status RankProgram(int argc, char** argv) {
  WorldOptions options;
  if (const char* const backend = getenv(kBackend)) options.backend = backend;
  const std::string folder = getenv(kFolder);
  TESSERA_ASSIGN_OR_RETURN(const World* world, Init(&argc, argv, options));
  at::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(64, 128), torch::nn::ReLU(),
                              torch::nn::Linear(128, 1));
  proto::Config config;
  config.set_train_micro_batch_size_per_gpu(8);
  config.set_gradient_clipping(0);
  config.mutable_optimizer()->set_type("AdamW");
  config.mutable_zero_optimization()->set_stage(3);
  TESSERA_ASSIGN_OR_RETURN(auto engine, Engine::Create(model, config));
  std::string line = absl::StrCat("losses ", world->rank());
  for (int step = 0; step < 30; ++step) {
    if (step == 10) Print(absl::StrCat("pid ", getpid(), "\n"));
    if ((step == 10 && !AwaitFlag(folder + "/attacked", kPatience)) ||
        (step == 20 && !AwaitFlag(folder + "/go on", kPatience))) {
      return absl::DeadlineExceededError("the test has gone");
    }
    at::manual_seed(100 * step + world->rank());
    const at::Tensor x = at::randn({8, 64});
    const at::Tensor loss =
        (model->forward(x) - x.sum(1, /*keepdim=*/true)).square().mean();
    TESSERA_RETURN_IF_ERROR(engine->Backward(loss));
    TESSERA_RETURN_IF_ERROR(engine->Step());
    char text[64];
    std::snprintf(text, sizeof(text), " %a", loss.item<double>());
    line += text;
  }
  Print(line + "\n");
  return engine->Close();
}

int RankMain(int argc, char** argv) {
  // It must run before libtorch starts threads, which the mount namespace
  // forbids.
  if (!TwoHosts::EnterIfTold()) return 1;
  const absl::Status status =
      CatchTorch("rank", [&] { return RankProgram(argc, argv); });
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  Shutdown();
  return status.ok() ? 0 : 1;
}

// ---- the test's side ----

// A job's processes: the launcher, or each rank by itself.
using Job = std::vector<std::unique_ptr<Process>>;

// The lines that begin with `word`, of all processes, sorted.
std::vector<std::string> Lines(const std::vector<std::string>& outputs,
                               const std::string& word) {
  std::vector<std::string> lines;
  for (const std::string& out : outputs) {
    for (absl::string_view line : absl::StrSplit(out, '\n')) {
      if (absl::StartsWith(line, word)) lines.emplace_back(line);
    }
  }
  std::sort(lines.begin(), lines.end());
  return lines;
}

std::vector<std::string> Outputs(const Job& job) {
  std::vector<std::string> outputs;
  for (const auto& process : job) outputs.push_back(process->out());
  return outputs;
}

std::unique_ptr<Process> Launch(const std::string& folder,
                                const std::string& backend) {
  return std::make_unique<Process>(
      std::vector<std::string>{"--world=2", "--startup_timeout=60"},
      Env{{kProgram, "rank"},
          {kFolder, folder},
          {kBackend, backend},
          {"OMP_NUM_THREADS", "1"}});
}

Env ByHand(int rank, const std::string& folder, const std::string& master,
           int port) {
  return {{kProgram, "rank"},
          {kFolder, folder},
          {kBackend, "gloo"},
          {"OMP_NUM_THREADS", "1"},
          {"TESSERA_JOB_SECRET", kSecret},
          {"RANK", absl::StrCat(rank)},
          {"WORLD_SIZE", "2"},
          {"MASTER_ADDR", master},
          {"MASTER_PORT", absl::StrCat(port)}};
}

// The losses at the end of a job that nobody holds up any more.
std::vector<std::string> Finish(const Job& job) {
  std::vector<std::string> outputs;
  for (const auto& process : job) {
    const Finished run = process->Finish(kPatience);
    EXPECT_EQ(run.code, 0) << run.err;
    outputs.push_back(run.out);
  }
  return Lines(outputs, "losses");
}

const std::vector<std::string>& Undisturbed() {
  static const std::vector<std::string> losses = [] {
    const TempFolder folder;
    RaiseFlag(folder / "attacked");
    RaiseFlag(folder / "go on");
    Job job;
    job.push_back(Launch(folder.path(), "shm"));
    return Finish(job);
  }();
  return losses;
}

// Returns what both ends of a handshake of rank 1 with the job's store send.
AttackOptions Overheard() {
  const std::string key = KeyOfSecret(kSecret, kStorePurpose, "tessera");
  AttackOptions result;
  Greeting greeting(key, -1, 2);
  int fds[2];
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
  std::thread connects([&] {
    EXPECT_TRUE(
        Introduce(fds[0], key, 1, Deadline::After(absl::Seconds(20))).ok());
  });
  while (!greeting.there()) {
    std::string bytes(greeting.wanted(), 0), answer;
    const ssize_t got = recv(fds[1], &bytes[0], bytes.size(), 0);
    if (got <= 0 || !greeting.Take(bytes.substr(0, got), &answer)) break;
    result.sent += bytes.substr(0, got);
    result.got += answer;
    (void)send(fds[1], answer.data(), answer.size(), MSG_NOSIGNAL);
  }
  connects.join();
  for (int fd : fds) close(fd);
  return result;
}

// The ranks of a job that has come to its 11th step.
std::vector<pid_t> RanksOf(const Job& job) {
  const size_t per_process = job.size() == 1 ? 2 : 1;
  for (const auto& process : job) {
    EXPECT_TRUE(process->WaitForLines(static_cast<int>(per_process)));
  }
  std::vector<pid_t> pids;
  for (const std::string& line : Lines(Outputs(job), "pid ")) {
    pids.push_back(atoi(line.c_str() + 4));
  }
  return pids;
}

void ExpectRepelled(Attack* attack, int most_bytes, int64_t least_streams) {
  const AttackReport report = attack->WaitUntilSent();
  EXPECT_EQ(report.error, "");
  EXPECT_LE(report.most_bytes, most_bytes);
  EXPECT_GE(report.streams, least_streams);
  std::printf("%d streams, %d closed doors, %d bytes at most\n",
              static_cast<int>(report.streams),
              static_cast<int>(report.closed_doors),
              static_cast<int>(report.most_bytes));
}

// Lets the job go on under `attacks`, to its end.
void TrainUnder(const Job& job, const std::vector<pid_t>& processes,
                const std::string& folder,
                const std::vector<std::unique_ptr<Attack>>& attacks,
                const std::function<void()>& check) {
  std::vector<int64_t> before;
  for (pid_t pid : processes) before.push_back(ResidentBytes(pid));
  for (const auto& attack : attacks) {
    EXPECT_TRUE(attack->WaitUntilUnderWay());
  }
  RaiseFlag(folder + "/attacked");
  check();
  for (size_t i = 0; i < processes.size(); ++i) {
    const int64_t growth = ResidentBytes(processes[i]) - before[i];
    EXPECT_LT(growth, kMaxGrowth) << "process " << i;
    std::printf("process %d grows by %d KiB\n", static_cast<int>(i),
                static_cast<int>(growth >> 10));
  }
  RaiseFlag(folder + "/go on");
  const std::vector<std::string> losses = Finish(job);
  EXPECT_THAT(losses, SizeIs(2));
  EXPECT_EQ(losses, Undisturbed());
}

// `streams`: to each target.
void AttackLocalJob(const std::string& backend, int streams) {
  const TempFolder folder;
  Job job;
  job.push_back(Launch(folder.path(), backend));
  std::vector<pid_t> processes = RanksOf(job);
  ASSERT_THAT(processes, SizeIs(2));
  processes.push_back(job[0]->pid());
  AttackOptions options = Overheard();
  options.streams = streams;
  for (pid_t pid : processes) {
    for (const AttackTarget& target : ListeningAt(pid, "any interface")) {
      EXPECT_EQ(target.address, "127.0.0.1") << target.port;
      options.targets.push_back(target);
    }
  }
  EXPECT_THAT(options.targets, SizeIs(testing::Ge(2u)));
  std::vector<std::unique_ptr<Attack>> attacks;
  attacks.push_back(std::make_unique<Attack>(options));
  const bool root = geteuid() == 0;
  if (root) {
    options.user = 65534;
    options.seed = 2;
    options.streams = 2000;
    attacks.push_back(std::make_unique<Attack>(options));
  }
  TrainUnder(job, processes, folder.path(), attacks, [&] {
    // A few may not get through.
    ExpectRepelled(attacks[0].get(), kOneAnswer, 2 * (streams - 200));
    if (root) ExpectRepelled(attacks[1].get(), kOneAnswer, 2000);
  });
}

// The sockets are among those of a job over Gloo, which gets all streams.
TEST(HostileTest, ALocalJob) { AttackLocalJob("shm", 5200); }

TEST(HostileTest, ALocalJobOverGloo) { AttackLocalJob("gloo", 10200); }

// Strangers are there first, and know where the ranks will meet.
TEST(HostileTest, AStart) {
  const TempFolder folder;
  RaiseFlag(folder / "attacked");
  RaiseFlag(folder / "go on");
  const int port = FreePort();
  Job job;
  job.push_back(std::make_unique<Process>(
      std::vector<std::string>{}, ByHand(0, folder.path(), "127.0.0.1", port)));
  const Deadline deadline = Deadline::After(kPatience);
  int fd = -1;
  while (fd < 0 && !deadline.HasPassed()) {
    fd = ConnectTo("127.0.0.1", absl::StrCat(port));
  }
  AttackOptions options = Overheard();
  options.targets = {{"127.0.0.1", absl::StrCat(port)}};
  Attack attack(options);
  EXPECT_TRUE(attack.WaitUntilUnderWay());
  job.push_back(std::make_unique<Process>(
      std::vector<std::string>{}, ByHand(1, folder.path(), "127.0.0.1", port)));
  EXPECT_EQ(Finish(job), Undisturbed());
  close(fd);
}

TEST(HostileTest, TwoHosts) {
  const TwoHosts hosts("beta", testing::TempDir());
  if (!hosts.trouble().empty()) GTEST_SKIP() << hosts.trouble();
  const TempFolder folder;
  Job job;
  for (int r = 0; r < 2; ++r) {
    Env env = ByHand(r, folder.path(), TwoHosts::kAddresses[0], 29500);
    env.push_back(hosts.Place(r));
    job.push_back(std::make_unique<Process>(std::vector<std::string>{}, env));
  }
  const std::vector<pid_t> ranks = RanksOf(job);
  ASSERT_THAT(ranks, SizeIs(2));
  std::vector<std::unique_ptr<Attack>> attacks;
  for (int r = 0; r < 2; ++r) {
    AttackOptions options = Overheard();
    options.targets = ListeningAt(job[r]->pid(), TwoHosts::kAddresses[r]);
    attacks.push_back(
        std::make_unique<Attack>(options, Env{hosts.Place(1 - r)}));
  }
  TrainUnder(job, ranks, folder.path(), attacks, [&] {
    // Rank 0 has the store and hears of ends; Gloo takes nobody any more.
    ExpectRepelled(attacks[0].get(), kOneAnswer, 20000);
    ExpectRepelled(attacks[1].get(), kNoReply, 0);
  });
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  tessera::ServeForks(tessera::kProgram, &argc, &argv);
  tessera::TwoHosts::ServeIfHelper(argc, argv);
  tessera::Attack::ServeIfAttacker();
  if (getenv(tessera::kProgram) != nullptr)
    tessera::ExitAtOnce(tessera::RankMain(argc, argv));
  testing::InitGoogleTest(&argc, argv);
  tessera::RunTestsAndExit();
}
