// Two hosts: two network namespaces with names and /etc/hosts of their own,
// joined by a virtual cable. Four ranks there train to the bits of four on one
// host, over gloo and over the hierarchical backend, which they choose.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "comm/world/world.h"
#include "config/config.pb.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/launch/two_hosts.h"
#include "tests/support/fork_server.h"
#include "tests/support/process.h"
#include "third_party/gtest/run_and_exit.h"
#include "torch/torch.h"

namespace tessera {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;

constexpr char kProgram[] = "TESSERA_MULTIHOST_PROGRAM";
constexpr char kBackend[] = "TESSERA_MULTIHOST_BACKEND";   // of WorldOptions
constexpr char kReduce[] = "TESSERA_MULTIHOST_REDUCE";     // instead, if set
constexpr char kForEver[] = "TESSERA_MULTIHOST_FOR_EVER";  // train, if set
constexpr const char* kAlpha = TwoHosts::kAddresses[0];

void Print(const std::string& line) {  // one write: lines do not mix
  if (write(STDOUT_FILENO, line.data(), line.size()) < 0) _exit(99);
}

// ---- the program of a rank ----

// Returns "rank 1 of 4: 0x1.8p+0 ... weight <bits>": the losses of five steps
// and a hash of a parameter after them.
absl::StatusOr<std::string> Train(const World& world) {
  at::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(16, 32), torch::nn::ReLU(),
                              torch::nn::Linear(32, 1));
  proto::Config config;
  config.set_train_micro_batch_size_per_gpu(8);
  config.set_gradient_clipping(0);
  config.mutable_optimizer()->set_type("AdamW");
  config.mutable_zero_optimization()->set_stage(3);
  TESSERA_ASSIGN_OR_RETURN(auto engine, Engine::Create(model, config));
  std::string line =
      absl::StrCat("rank ", world.rank(), " of ", world.world_size(), ":");
  const bool for_ever = getenv(kForEver) != nullptr;
  for (int step = 0; step < 5 || for_ever; ++step) {
    if (for_ever && step == 5) Print("training\n");
    at::manual_seed(100 * step + world.rank());
    at::Tensor x = at::randn({8, 16});
    at::Tensor loss =
        (model->forward(x) - x.sum(1, /*keepdim=*/true)).square().mean();
    TESSERA_RETURN_IF_ERROR(engine->Backward(loss));
    TESSERA_RETURN_IF_ERROR(engine->Step());
    char text[64];
    std::snprintf(text, sizeof(text), " %a", loss.item<double>());
    line += text;
  }
  TESSERA_ASSIGN_OR_RETURN(const at::Tensor weight,
                           engine->Parameter("0.weight"));
  for (int i = 0; i < 3; ++i) {
    char text[64];
    std::snprintf(text, sizeof(text), " %a", weight[i].sum().item<double>());
    line += text;
  }
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return line;
}

// Bytes that have left this network, the loopback not counted.
int64_t BytesSent() {
  std::ifstream devices("/proc/self/net/dev");
  int64_t sent = 0;
  for (std::string line; std::getline(devices, line);) {
    const std::vector<std::string> fields =
        absl::StrSplit(line, absl::ByAnyChar(" :"), absl::SkipEmpty());
    int64_t bytes = 0;
    if (fields.size() > 9 && fields[0] != "lo" &&
        absl::SimpleAtoi(fields[9], &bytes)) {
      sent += bytes;
    }
  }
  return sent;
}

constexpr int64_t kReducedBytes = 8 << 20;

// Returns "rank 1 of 4: <bytes that its host sent in an all-reduce>".
absl::StatusOr<std::string> Reduce(const World& world) {
  Communicator& comm = *world.communicator();
  at::Tensor t = torch::ones({kReducedBytes / 4});
  TESSERA_RETURN_IF_ERROR(comm.Barrier("before"));
  const int64_t before = BytesSent();
  TESSERA_RETURN_IF_ERROR(comm.Barrier("begin"));
  TESSERA_RETURN_IF_ERROR(comm.AllReduceSum(t, {"reduce"}).Wait());
  TESSERA_RETURN_IF_ERROR(comm.Barrier("end"));
  return absl::StrCat("rank ", world.rank(), " of ", world.world_size(), ": ",
                      BytesSent() - before);
}

absl::Status RankProgram(int argc, char** argv) {
  WorldOptions options;
  if (const char* const backend = getenv(kBackend)) options.backend = backend;
  TESSERA_ASSIGN_OR_RETURN(const World* world, Init(&argc, argv, options));
  TESSERA_ASSIGN_OR_RETURN(const std::string line,
                           getenv(kReduce) ? Reduce(*world) : Train(*world));
  Print(absl::StrCat(line, "\nlocal ", world->local_rank(), "/",
                     world->local_world_size(), " ",
                     std::string(world->communicator()->backend()), "\n"));
  return absl::OkStatus();
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

// ---- the tests ----

class MultihostTest : public testing::Test {
 protected:
  // Skips where they cannot be made. They stay for the tests that follow.
  void MakeHosts(const std::string& second_name) {
    std::unique_ptr<TwoHosts>& hosts = hosts_made_[second_name];
    if (hosts == nullptr) {
      hosts = std::make_unique<TwoHosts>(second_name, testing::TempDir());
    }
    hosts_ = hosts.get();
    if (!hosts_->trouble().empty()) GTEST_SKIP() << hosts_->trouble();
  }
  void SetUp() override { MakeHosts("beta"); }
  static void TearDownTestSuite() { hosts_made_.clear(); }

  using Ranks = std::vector<std::unique_ptr<Process>>;

  std::unique_ptr<Process> Start(int host, Env env, int startup_timeout) {
    env.emplace_back(kProgram, "rank");
    env.push_back(hosts_->Place(host));
    env.emplace_back("OMP_NUM_THREADS", "1");
    return std::make_unique<Process>(
        std::vector<std::string>{
            absl::StrCat("--startup_timeout=", startup_timeout)},
        env);
  }

  // The ranks, each on its host.
  Ranks StartRanks(const std::function<Env(int)>& env_of) {
    Ranks ranks;
    for (int r = 0; r < 4; ++r)
      ranks.push_back(Start(host_of_[r], env_of(r), 30));
    return ranks;
  }

  // The lines of all, by rank.
  std::vector<std::string> RunOnHosts(const std::function<Env(int)>& env_of) {
    const Ranks ranks = StartRanks(env_of);
    std::vector<std::string> lines;
    for (int r = 0; r < 4; ++r) {
      const Finished run = ranks[r]->Finish(absl::Seconds(90));
      EXPECT_EQ(run.code, 0) << run.err;
      EXPECT_THAT(run.out,
                  HasSubstr(absl::StrCat("local ", locals_[r], " ", backend_)));
      lines.push_back(run.out.substr(0, run.out.find('\n')));
    }
    return lines;
  }

  // Returns what `torchrun --nnodes=2 --nproc-per-node=2` sets, without its
  // agent's store.
  Env Torchrun(int rank, const std::string& master) const {
    Env env = {{"RANK", absl::StrCat(rank)},
               {"WORLD_SIZE", "4"},
               {"LOCAL_RANK", locals_[rank].substr(0, 1)},
               {"LOCAL_WORLD_SIZE", locals_[rank].substr(2)},
               {"MASTER_ADDR", master},
               {"MASTER_PORT", "29500"}};
    if (backend_ == "gloo") env.emplace_back(kBackend, "gloo");
    return env;
  }

  std::vector<int> host_of_ = {0, 0, 1, 1};  // by rank
  // What each rank says about its place, physically, and its backend.
  std::vector<std::string> locals_ = {"0/2", "1/2", "0/2", "1/2"};
  std::string backend_ = "hierarchical";

 private:
  static std::map<std::string, std::unique_ptr<TwoHosts>> hosts_made_;
  TwoHosts* hosts_ = nullptr;
};
std::map<std::string, std::unique_ptr<TwoHosts>> MultihostTest::hosts_made_;

std::vector<std::string> RunOnOneHost() {
  const Finished run =
      Process({"--world=4"}, {{kProgram, "rank"}, {"OMP_NUM_THREADS", "1"}})
          .Finish(absl::Seconds(90));
  EXPECT_EQ(run.code, 0) << run.err;
  std::vector<std::string> lines(4);
  for (const std::string& line :
       std::vector<std::string>(absl::StrSplit(run.out, '\n'))) {
    for (int r = 0; r < 4; ++r) {
      if (absl::StartsWith(line, absl::StrCat("rank ", r, " of 4: 0x"))) {
        lines[r] = line;
      }
    }
  }
  for (const std::string& line : lines) EXPECT_NE(line, "");
  return lines;
}

const std::vector<std::string>& OneHostLines() {
  static const std::vector<std::string> lines = RunOnOneHost();
  return lines;
}

TEST_F(MultihostTest, ByAddress) {
  EXPECT_EQ(RunOnHosts([&](int r) { return Torchrun(r, kAlpha); }),
            OneHostLines());
}

// "alpha" is 127.0.1.1 on alpha.
TEST_F(MultihostTest, ByANameThatLeadsToTheLoopbackAtHome) {
  EXPECT_EQ(RunOnHosts([&](int r) { return Torchrun(r, "alpha"); }),
            OneHostLines());
}

TEST_F(MultihostTest, TwoNetworksOfOneHost) {
  MakeHosts("alpha");
  if (IsSkipped() || HasFatalFailure()) return;
  locals_ = {"0/4", "1/4", "2/4", "3/4"};
  EXPECT_EQ(RunOnHosts([&](int r) { return Torchrun(r, kAlpha); }),
            OneHostLines());
}

TEST_F(MultihostTest, OverGloo) {
  backend_ = "gloo";
  EXPECT_EQ(RunOnHosts([&](int r) { return Torchrun(r, kAlpha); }),
            OneHostLines());
}

TEST_F(MultihostTest, ThreeRanksAndOne) {
  host_of_ = {0, 0, 0, 1};
  locals_ = {"0/3", "1/3", "2/3", "0/1"};
  EXPECT_EQ(RunOnHosts([&](int r) { return Torchrun(r, kAlpha); }),
            OneHostLines());
}

TEST_F(MultihostTest, RanksThatAlternate) {
  host_of_ = {0, 1, 0, 1};
  locals_ = {"0/2", "0/2", "1/2", "1/2"};
  EXPECT_EQ(RunOnHosts([&](int r) { return Torchrun(r, kAlpha); }),
            OneHostLines());
}

TEST_F(MultihostTest, Rank0IsNotOnItsHost) {
  const Finished run =
      Start(/*host=*/1, Torchrun(0, kAlpha), /*startup_timeout=*/1)
          ->Finish(absl::Seconds(20));
  EXPECT_EQ(run.code, 1);
  EXPECT_EQ(run.err,
            absl::StrCat("UNAVAILABLE: rendezvous tcp://", kAlpha,
                         ":29500: rank 0 listens where it runs, and '", kAlpha,
                         "' does not lead to that host; give all ranks rank "
                         "0's host as MASTER_ADDR or --rendezvous, or start "
                         "rank 0 there\n"));
}

// Rank 1 or both have it; the error says more than Gloo's own.
TEST_F(MultihostTest, AnInterfaceThatGlooCannotListenAt) {
  for (const char* name : {"^lo,docker", "lo", "cabel"}) {
    for (const bool both : {true, false}) {
      std::vector<std::unique_ptr<Process>> ranks;
      for (int r = 0; r < 2; ++r) {
        Env env = {{"RANK", absl::StrCat(r)}, {"WORLD_SIZE", "2"},
                   {"LOCAL_RANK", "0"},       {"LOCAL_WORLD_SIZE", "1"},
                   {"MASTER_ADDR", kAlpha},   {"MASTER_PORT", "29500"},
                   {kBackend, "gloo"}};
        if (both || r == 1) env.emplace_back("GLOO_SOCKET_IFNAME", name);
        ranks.push_back(Start(r, env, /*startup_timeout=*/20));
      }
      for (const auto& rank : ranks) {
        const Finished run = rank->Finish(absl::Seconds(40));
        EXPECT_EQ(run.code, 1);
        EXPECT_THAT(
            run.err,
            ContainsRegex(absl::StrCat(
                "(^|\n)INVALID_ARGUMENT: rank [01]: GLOO_SOCKET_IFNAME is '",
                name[0] == '^' ? "\\" : "", name,
                "': .*; this host has cable \\(10.77.0.[12].*\\), lo "
                "\\(127.0.0.1.*\\); set it to the one")));
      }
    }
  }
}

TEST_F(MultihostTest, TheInterfaceThatGlooIsTold) {
  backend_ = "gloo";
  EXPECT_EQ(RunOnHosts([&](int r) {
              Env env = Torchrun(r, kAlpha);
              env.emplace_back("GLOO_SOCKET_IFNAME", "cable");
              return env;
            }),
            OneHostLines());
}

TEST_F(MultihostTest, AKilledRankEndsThoseOfBothHosts) {
  Ranks ranks = StartRanks([&](int r) {
    Env env = Torchrun(r, kAlpha);
    env.emplace_back(kForEver, "1");
    return env;
  });
  for (const auto& rank : ranks) ASSERT_TRUE(rank->WaitForLines(1));
  const absl::Time killed = absl::Now();
  kill(ranks[3]->pid(), SIGKILL);
  for (int r = 0; r < 3; ++r) {
    const Finished run = ranks[r]->Finish(absl::Seconds(20));
    EXPECT_EQ(run.code, 1);
    EXPECT_THAT(run.err, HasSubstr("rank 3 has ended"));
  }
  EXPECT_LT(absl::Now() - killed, absl::Seconds(2));
}

// The unit is tensors: what each host sends of an all-reduce. Where ranks take
// a quarter of the tensor each, that is at most a reduce-scatter's 1 and an
// all-gather's 1/2; gloo's two ranks send 1/2 each in both.
TEST_F(MultihostTest, WhatLeavesAHost) {
  for (const char* backend : {"hierarchical", "gloo"}) {
    backend_ = backend;
    const std::vector<std::string> lines = RunOnHosts([&](int r) {
      Env env = Torchrun(r, kAlpha);
      env.emplace_back(kReduce, "1");
      return env;
    });
    double sent[2] = {};
    for (int host = 0; host < 2; ++host) {
      const std::string line = lines[2 * host];
      ASSERT_TRUE(
          absl::SimpleAtod(line.substr(line.find(": ") + 2), &sent[host]));
      sent[host] /= kReducedBytes;
    }
    const bool gloo = backend_ == "gloo";
    EXPECT_NEAR(std::max(sent[0], sent[1]), gloo ? 2 : 1.5, 0.15);
    EXPECT_NEAR(std::min(sent[0], sent[1]), gloo ? 2 : 1, 0.15);
  }
}

TEST_F(MultihostTest, AsSlurmStartsThem) {
  EXPECT_EQ(RunOnHosts([](int r) -> Env {
              return {{"SLURM_PROCID", absl::StrCat(r)},
                      {"SLURM_NTASKS", "4"},
                      {"SLURM_LOCALID", absl::StrCat(r % 2)},
                      {"SLURM_NODEID", absl::StrCat(r / 2)},
                      {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"},
                      {"SLURM_STEP_NODELIST", "alpha,beta"},
                      {"SLURM_JOB_ID", "4711"},
                      {"SLURM_STEP_ID", "0"}};
            }),
            OneHostLines());
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  tessera::ServeForks(tessera::kProgram, &argc, &argv);
  tessera::TwoHosts::ServeIfHelper(argc, argv);
  if (getenv(tessera::kProgram) != nullptr) {
    tessera::ExitAtOnce(tessera::RankMain(argc, argv));
  }
  testing::InitGoogleTest(&argc, argv);
  tessera::RunTestsAndExit();
}
