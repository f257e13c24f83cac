// Init by a launcher's variables, and by --rendezvous.
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/launch/multiproc_launch_test_util.h"
#include "tests/support/process.h"
#include "torch/csrc/distributed/c10d/TCPStore.hpp"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Ranks 0 to n-1, all started before the first is waited for. args(r) and
// env(r) may differ.
template <typename ArgsOf, typename EnvOf>
std::vector<Finished> RunRanks(const std::vector<int>& ranks, ArgsOf args_of,
                               EnvOf env_of) {
  std::vector<std::unique_ptr<Process>> processes;
  for (int r : ranks) {
    processes.push_back(
        std::make_unique<Process>(args_of(r), Named("plain", env_of(r))));
  }
  std::vector<Finished> results;
  for (auto& process : processes) results.push_back(process->Finish());
  return results;
}

Env Variables(int rank, int world_size, int port) {
  return {{"RANK", absl::StrCat(rank)},
          {"WORLD_SIZE", absl::StrCat(world_size)},
          {"LOCAL_RANK", absl::StrCat(rank)},
          {"LOCAL_WORLD_SIZE", absl::StrCat(world_size)},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", absl::StrCat(port)}};
}

std::vector<std::string> NoArgs(int) { return {}; }
Env NoEnv(int) { return {}; }

void ExpectWorldOf(const std::vector<Finished>& runs) {
  for (size_t r = 0; r < runs.size(); ++r) {
    EXPECT_EQ(runs[r].code, 0) << runs[r].err;
    EXPECT_THAT(runs[r].out, HasSubstr(absl::StrCat(
                                 "rank ", r, "/", runs.size(), " local ", r,
                                 "/", runs.size(), " sum ", runs.size())));
    EXPECT_EQ(runs[r].err, "");
  }
}

TEST(RendezvousTest, Variables) {
  const int port = FreePort();
  ExpectWorldOf(RunRanks({0, 1, 2}, NoArgs,
                         [&](int r) { return Variables(r, 3, port); }));
}

TEST(RendezvousTest, VariablesWithTheAgentsStore) {
  c10d::TCPStoreOptions agent;
  agent.port = 0;
  agent.isServer = true;
  agent.waitWorkers = false;
  const c10d::TCPStore store("127.0.0.1", agent);
  for (const char* attempt : {"0", "1"}) {  // restarted, in the same store
    ExpectWorldOf(RunRanks({0, 1}, NoArgs, [&](int r) {
      Env env = Variables(r, 2, store.getPort());
      env.emplace_back("TORCHELASTIC_USE_AGENT_STORE", "True");
      env.emplace_back("TORCHELASTIC_RESTART_COUNT", attempt);
      return env;
    }));
  }
}

TEST(RendezvousTest, TcpByFlags) {
  const std::string where =
      absl::StrCat("--rendezvous=tcp://127.0.0.1:", FreePort());
  ExpectWorldOf(RunRanks(
      {0, 1},
      [&](int r) -> std::vector<std::string> {
        return {where, absl::StrCat("--rank=", r), "--world_size=2"};
      },
      NoEnv));
}

std::string TempFile(const char* name) {
  const char* const dir = getenv("TEST_TMPDIR");
  return absl::StrCat(dir != nullptr ? dir : "/tmp", "/", name, ".", getpid());
}

TEST(RendezvousTest, FileIsGoneAfterwards) {
  const std::string path = TempFile("meet");
  ExpectWorldOf(RunRanks(
      {0, 1, 2},
      [&](int r) -> std::vector<std::string> {
        return {absl::StrCat("--rendezvous=file://", path),
                absl::StrCat("--rank=", r), "--world_size=3"};
      },
      NoEnv));
  EXPECT_NE(access(path.c_str(), F_OK), 0);
}

TEST(RendezvousTest, FileOfThisUserAlone) {
  const std::string path = TempFile("own");
  const std::vector<std::string> args = {
      absl::StrCat("--rendezvous=file://", path), "--rank=0", "--world_size=2",
      "--startup_timeout=0.1"};
  EXPECT_EQ(RunOne("plain", args).code, 1);  // rank 1 does not come
  struct stat file = {};
  ASSERT_EQ(stat(path.c_str(), &file), 0);
  EXPECT_EQ(file.st_mode & 0777, 0600);
  ASSERT_EQ(unlink(path.c_str()), 0);
  ASSERT_EQ(symlink("elsewhere", path.c_str()), 0);
  EXPECT_THAT(
      RunOne("plain", args).err,
      HasSubstr(absl::StrCat("PERMISSION_DENIED: rendezvous file://", path,
                             ": refused: it is a symbolic link")));
  unlink(path.c_str());
}

TEST(RendezvousTest, NamesTheRanksThatHaveNotCome) {
  const std::string where = absl::StrCat("tcp://127.0.0.1:", FreePort());
  const auto args = [&](int r) -> std::vector<std::string> {
    return {absl::StrCat("--rendezvous=", where), absl::StrCat("--rank=", r),
            "--world_size=4", "--startup_timeout=3"};
  };
  for (const Finished& run : RunRanks({0, 2}, args, NoEnv)) {
    EXPECT_EQ(run.code, 1);
    EXPECT_LT(run.took, absl::Seconds(15));
    EXPECT_EQ(run.err, absl::StrCat("DEADLINE_EXCEEDED: rendezvous ", where,
                                    ": ranks 1, 3 of 4 have not come within 3 "
                                    "s\n"));
  }
}

TEST(RendezvousTest, NamesRank0IfItIsTheOne) {
  const std::string where = absl::StrCat("tcp://127.0.0.1:", FreePort());
  const Finished run =
      RunOne("plain", {absl::StrCat("--rendezvous=", where), "--rank=1",
                       "--world_size=2", "--startup_timeout=2"});
  EXPECT_EQ(run.code, 1);
  EXPECT_LT(run.took, absl::Seconds(15));
  EXPECT_EQ(run.err, absl::StrCat("DEADLINE_EXCEEDED: rendezvous ", where,
                                  ": rank 0 has not come within 2 s (no store "
                                  "answers there)\n"));
}

TEST(RendezvousTest, PortInUse) {
  ListeningPort foreign;  // accepts connections and never says a word
  const std::string where = absl::StrCat("tcp://127.0.0.1:", foreign.port());
  const auto args = [](int) {
    return std::vector{std::string("--startup_timeout=3")};
  };
  const std::vector<Finished> runs = RunRanks(
      {0, 1}, args, [&](int r) { return Variables(r, 2, foreign.port()); });
  EXPECT_EQ(runs[0].code, 1);
  EXPECT_EQ(runs[0].err, absl::StrCat("UNAVAILABLE: rendezvous ", where,
                                      ": port ", foreign.port(),
                                      " is in use (rank 0 cannot listen)\n"));
  EXPECT_EQ(runs[1].code, 1);
  EXPECT_LT(runs[1].took, absl::Seconds(15));
  EXPECT_EQ(runs[1].err,
            absl::StrCat("DEADLINE_EXCEEDED: rendezvous ", where,
                         ": rank 0 has not come within 3 s (no store answers "
                         "there)\n"));
}

TEST(RendezvousTest, ARankThatComesTwice) {
  const std::string path = TempFile("twice");
  const std::vector<std::string> args = {
      absl::StrCat("--rendezvous=file://", path), "--rank=0", "--world_size=2",
      "--startup_timeout=2"};
  Process first(args, Named("plain", {}));
  const Finished second = RunOne("plain", args);
  const Finished other = first.Finish();
  unlink(path.c_str());
  EXPECT_THAT(absl::StrCat(second.err, other.err),
              AllOf(HasSubstr("rank 0 has come twice"),
                    HasSubstr("rank 1 of 2 has not come within 2 s")));
}

TEST(RendezvousTest, WorldSizesThatDiffer) {
  const std::string path = TempFile("sizes");
  const std::vector<Finished> runs = RunRanks(
      {0, 1},
      [&](int r) -> std::vector<std::string> {
        return {absl::StrCat("--rendezvous=file://", path),
                absl::StrCat("--rank=", r),
                absl::StrCat("--world_size=", 2 + r), "--startup_timeout=2"};
      },
      NoEnv);
  unlink(path.c_str());
  EXPECT_EQ(runs[0].code, 1);
  EXPECT_EQ(runs[1].code, 1);
  EXPECT_THAT(absl::StrCat(runs[0].err, runs[1].err),
              AllOf(HasSubstr("WORLD_SIZE is "), HasSubstr("another rank")));
}

TEST(RendezvousTest, RefusesWhatDoesNotFit) {
  EXPECT_THAT(RunOne("plain", {}, {{"RANK", "2"}, {"WORLD_SIZE", "2"}}).err,
              HasSubstr("RANK is 2, expected 0 to 1"));
  EXPECT_THAT(RunOne("plain", {}, {{"RANK", "0"}}).err,
              HasSubstr("WORLD_SIZE is missing"));
  EXPECT_THAT(
      RunOne("plain", {"--rendezvous=udp://x", "--rank=0", "--world_size=2"})
          .err,
      HasSubstr("expected env://, tcp://host:port or file:///path"));
}

}  // namespace
}  // namespace tessera
