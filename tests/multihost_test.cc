// Two hosts: two network namespaces with names and /etc/hosts of their own,
// joined by a virtual cable, two ranks in each. The four must train to the same
// bits as four on one host.
//
//   alpha 10.77.0.1 ======veth====== 10.77.0.2 beta     each with a loopback
//   rank 0, rank 1                   rank 2, rank 3
//
// Each namespace belongs to a child of this program that does nothing else.
// The kernel takes namespace and cable away with the last process in it, and
// all of them die with this program: nothing is left whatever happens. Needs
// root (to make namespaces) and ip; skips otherwise, saying so.
#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "comm/world.h"
#include "config/config.pb.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/process.h"
#include "torch/torch.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

constexpr char kProgram[] = "TESSERA_MULTIHOST_PROGRAM";
constexpr char kHost[] = "TESSERA_MULTIHOST_HOST";  // process id of its holder
constexpr char kAlpha[] = "10.77.0.1";
constexpr char kBeta[] = "10.77.0.2";

void Print(const std::string& line) {  // one write: lines do not mix
  if (write(STDOUT_FILENO, line.data(), line.size()) < 0) _exit(99);
}

int Fail(const std::string& what) {
  std::fprintf(stderr, "%s: %s\n", what.c_str(), strerror(errno));
  return 1;
}

// ---- the program of a rank ----

// "rank 1 of 4: 0x1.8p+0 ... weight <bits>": the losses of five steps and a
// hash of a parameter after them.
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
  for (int step = 0; step < 5; ++step) {
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

absl::Status RankProgram(int argc, char** argv) {
  TESSERA_ASSIGN_OR_RETURN(const World* world, Init(&argc, argv));
  TESSERA_ASSIGN_OR_RETURN(const std::string line, Train(*world));
  Print(absl::StrCat(line, "\nlocal ", world->local_rank(), "/",
                     world->local_world_size(), "\n"));
  return absl::OkStatus();
}

// Goes to the namespaces of `holder`.
bool Enter(const std::string& holder) {
  for (const char* kind : {"net", "uts", "mnt"}) {
    const int fd = open(absl::StrCat("/proc/", holder, "/ns/", kind).c_str(),
                        O_RDONLY | O_CLOEXEC);
    if (fd < 0 || setns(fd, 0) != 0) return false;
    close(fd);
  }
  return true;
}

int RankMain(int argc, char** argv) {
  const char* const holder = getenv(kHost);
  // Before libtorch starts threads, which the mount namespace forbids.
  if (holder != nullptr && !Enter(holder)) return Fail("setns");
  const absl::Status status =
      CatchTorch("rank", [&] { return RankProgram(argc, argv); });
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  Shutdown();
  return status.ok() ? 0 : 1;
}

// ---- hosts ----

// argv: name, path of its /etc/hosts. Says "here" and waits to be killed.
int HolderMain(int argc, char** argv) {
  if (argc != 3 || unshare(CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWNS) != 0) {
    return Fail("unshare");
  }
  if (sethostname(argv[1], strlen(argv[1])) != 0 ||
      mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      mount(argv[2], "/etc/hosts", nullptr, MS_BIND, nullptr) != 0) {
    return Fail("host name, /etc/hosts");
  }
  Print("here\n");
  while (true) pause();
}

// Runs ip with argv, in `kHost`'s network if that is set.
int IpMain(char** argv) {
  const char* const holder = getenv(kHost);
  if (holder != nullptr && !Enter(holder)) return Fail("setns");
  for (const char* ip : {"/sbin/ip", "/usr/sbin/ip", "/bin/ip"}) {
    execv(ip, argv);
  }
  return Fail("ip (package iproute2)");
}

Finished Ip(const std::string& arguments, const std::string& holder = "") {
  Env env = {{kProgram, "ip"}};
  if (!holder.empty()) env.emplace_back(kHost, holder);
  return Process(absl::StrSplit(arguments, ' '), env).Finish(absl::Seconds(20));
}

class MultihostTest : public testing::Test {
 protected:
  // `second_name`: the other host's name; that of the first makes it another
  // network of the same host, as containers are.
  void MakeHosts(const std::string& second_name) {
    // The name of a host leads to its own loopback, as Debian's installer has
    // it; the other's to the cable.
    Start("alpha", absl::StrCat("127.0.0.1 localhost\n127.0.1.1 alpha\n", kBeta,
                                " beta\n"));
    if (IsSkipped() || HasFatalFailure()) return;
    Start(second_name, absl::StrCat("127.0.0.1 localhost\n127.0.1.1 beta\n",
                                    kAlpha, " alpha\n"));
    if (IsSkipped() || HasFatalFailure()) return;
    const Finished cable =
        Ip(absl::StrCat("link add cable netns ", pids_[0],
                        " type veth peer name cable netns ", pids_[1]));
    if (cable.code != 0) {
      GTEST_SKIP() << "no virtual cable can be made here: " << cable.err;
    }
    const char* const addresses[] = {kAlpha, kBeta};
    for (int i = 0; i < 2; ++i) {
      for (const std::string& command :
           {std::string("link set lo up"),
            absl::StrCat("addr add ", addresses[i], "/24 dev cable"),
            std::string("link set cable up")}) {
        const Finished run = Ip(command, pids_[i]);
        ASSERT_EQ(run.code, 0) << command << ": " << run.err;
      }
    }
  }

  // Ranks 0 and 1 on the first host, 2 and 3 on the second; the lines of all,
  // by rank.
  std::vector<std::string> RunOnHosts(const std::function<Env(int)>& env_of) {
    std::vector<std::unique_ptr<Process>> ranks;
    for (int r = 0; r < 4; ++r) {
      Env env = env_of(r);
      env.emplace_back(kProgram, "rank");
      env.emplace_back(kHost, pids_[r / 2]);
      env.emplace_back("OMP_NUM_THREADS", "1");
      ranks.push_back(std::make_unique<Process>(
          std::vector<std::string>{"--startup_timeout=30"}, env));
    }
    std::vector<std::string> lines;
    for (int r = 0; r < 4; ++r) {
      const Finished run = ranks[r]->Finish(absl::Seconds(90));
      EXPECT_EQ(run.code, 0) << run.err;
      EXPECT_THAT(run.out, HasSubstr(locals_[r]));
      lines.push_back(run.out.substr(0, run.out.find('\n')));
    }
    return lines;
  }

  // What each rank says about its place, physically.
  std::vector<std::string> locals_ = {"local 0/2", "local 1/2", "local 0/2",
                                      "local 1/2"};

 private:
  void Start(const std::string& name, const std::string& hosts) {
    const std::string path =
        absl::StrCat(testing::TempDir(), "/hosts.", holders_.size());
    std::ofstream(path) << hosts;
    holders_.push_back(std::make_unique<Process>(
        std::vector<std::string>{name, path}, Env{{kProgram, "holder"}}));
    if (!holders_.back()->WaitForLines(1)) {
      const Finished run = holders_.back()->Finish(absl::Seconds(1));
      GTEST_SKIP() << "namespaces need root: " << run.err;
    }
    pids_.push_back(absl::StrCat(holders_.back()->pid()));
  }

  std::vector<std::unique_ptr<Process>> holders_;
  std::vector<std::string> pids_;
};

std::vector<std::string> OneHostLines() {
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

// As `torchrun --nnodes=2 --nproc-per-node=2` without its agent's store.
Env Torchrun(int rank, const std::string& master) {
  return {{"RANK", absl::StrCat(rank)},
          {"WORLD_SIZE", "4"},
          {"LOCAL_RANK", absl::StrCat(rank % 2)},
          {"LOCAL_WORLD_SIZE", "2"},
          {"MASTER_ADDR", master},
          {"MASTER_PORT", "29500"}};
}

TEST_F(MultihostTest, ByAddress) {
  MakeHosts("beta");
  if (IsSkipped() || HasFatalFailure()) return;
  EXPECT_EQ(RunOnHosts([](int r) { return Torchrun(r, kAlpha); }),
            OneHostLines());
}

// "alpha" is 127.0.1.1 on alpha.
TEST_F(MultihostTest, ByANameThatLeadsToTheLoopbackAtHome) {
  MakeHosts("beta");
  if (IsSkipped() || HasFatalFailure()) return;
  EXPECT_EQ(RunOnHosts([](int r) { return Torchrun(r, "alpha"); }),
            OneHostLines());
}

TEST_F(MultihostTest, TwoNetworksOfOneHost) {
  MakeHosts("alpha");
  if (IsSkipped() || HasFatalFailure()) return;
  locals_ = {"local 0/4", "local 1/4", "local 2/4", "local 3/4"};
  EXPECT_EQ(RunOnHosts([](int r) { return Torchrun(r, kAlpha); }),
            OneHostLines());
}

TEST_F(MultihostTest, AsSlurmStartsThem) {
  MakeHosts("beta");
  if (IsSkipped() || HasFatalFailure()) return;
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
  const char* const program = getenv(tessera::kProgram);
  const std::string name = program == nullptr ? "" : program;
  if (name == "holder") return tessera::HolderMain(argc, argv);
  if (name == "ip") return tessera::IpMain(argv);
  if (name == "rank") return tessera::RankMain(argc, argv);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
