// Start-ups in which a rank, or the store, stops for good. The test program
// runs again as a rank that calls Init, or as one that leaves at a certain
// point (see kProgram).
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "base/thread/deadline.h"
#include "base/torch_guard.h"
#include "comm/connect/job_secret.h"
#include "comm/launch/cpus.h"
#include "comm/rendezvous/local_address.h"
#include "comm/rendezvous/rank_info.h"
#include "comm/rendezvous/rendezvous.h"
#include "comm/rendezvous/store_client.h"
#include "comm/rendezvous/store_server.h"
#include "comm/world/build_stamp.h"
#include "comm/world/world.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/fork_server.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"
#include "third_party/gtest/run_and_exit.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kProgram[] = "TESSERA_STARTUP_TEST_PROGRAM";
constexpr char kPort[] = "TESSERA_STARTUP_TEST_PORT";
// Longer than two processes take until they meet, also on a busy host.
constexpr char kTimeout[] = "2";

// ---- the programs ----

void Say(const std::string& line) {
  if (write(STDOUT_FILENO, line.data(), line.size()) < 0) _exit(99);
}

RankInfo Info() {
  RankInfo info;
  info.host = HostId();
  info.network = NetworkId();
  info.cpus = AllowedCpus();
  info.build = BuildStamp();
  info.build_id = BuildId();
  return info;
}

// Hosts the store as rank 0, and stops once rank 1 has come.
absl::Status StopWhileMeeting(int port) {
  const std::string prefix = "tessera";
  StoreServer::Options server;
  server.loopback = true;
  server.port = static_cast<uint16_t>(port);
  server.world_size = 2;
  server.key = JobKey(kStorePurpose, prefix);
  StoreClientOptions client;
  client.host = "127.0.0.1";
  client.port = server.port;
  client.key = server.key;
  TESSERA_ASSIGN_OR_RETURN(client.server, StoreServer::Start(server));
  TESSERA_ASSIGN_OR_RETURN(
      const auto store,
      ConnectStore(client, Deadline::After(absl::Seconds(60))));
  Say("hosts\n");
  return CatchTorch("store", [&] {
    store->wait({"tessera/came/1"}, std::chrono::seconds(60));
    raise(SIGSTOP);
  });
}

// Meets as `rank` of 2, and ends by `sig` once the other one connects.
absl::Status LeaveWhileConnecting(int rank, int port, int sig) {
  TESSERA_ASSIGN_OR_RETURN(
      const RendezvousPlace place,
      ParseRendezvous(absl::StrCat("tcp://127.0.0.1:", port)));
  TESSERA_ASSIGN_OR_RETURN(const Meeting meeting,
                           Meet(
                               place, rank, 2, [] { return Info().Encode(); },
                               Deadline::After(absl::Seconds(60))));
  (void)CatchTorch("store", [&] {
    meeting.store->wait({absl::StrCat("alive/", 1 - rank)},
                        std::chrono::seconds(1));
  });
  raise(sig);
  return absl::OkStatus();
}

// Meets as rank 1, of a build that is another in `how`.
absl::Status MeetOfAnotherBuild(const std::string& how, int port) {
  TESSERA_ASSIGN_OR_RETURN(
      const RendezvousPlace place,
      ParseRendezvous(absl::StrCat("tcp://127.0.0.1:", port)));
  RankInfo info = Info();
  std::string text;
  if (how == "protocol") info.build = "protocol 0, libtorch 2.10.0";
  if (how == "file") info.build_id = "0123456789ab";
  if (how == "age") {  // the record's form before there were stamps
    text =
        absl::StrCat(info.host, "\n", info.network, "\n\n", info.cpus, "\n\n");
  } else {
    text = info.Encode();
  }
  return Meet(
             place, 1, 2, [text] { return text; },
             Deadline::After(absl::Seconds(60)))
      .status();
}

// Is killed after it has come, before it has announced itself.
absl::Status DieWhileRegistering(int port) {
  TESSERA_ASSIGN_OR_RETURN(
      const RendezvousPlace place,
      ParseRendezvous(absl::StrCat("tcp://127.0.0.1:", port)));
  const auto die = []() -> std::string {
    raise(SIGKILL);
    return "";
  };
  return Meet(place, 1, 2, die, Deadline::After(absl::Seconds(60))).status();
}

absl::Status RunProgram(const std::string& program, int argc, char** argv) {
  const char* const text = getenv(kPort);
  const int port = text == nullptr ? 0 : atoi(text);
  if (program == "die while registering") return DieWhileRegistering(port);
  if (program == "stop while meeting") return StopWhileMeeting(port);
  absl::string_view how = program;
  if (absl::ConsumePrefix(&how, "another ")) {
    return MeetOfAnotherBuild(std::string(how), port);
  }
  if (program == "stop while connecting") {
    return LeaveWhileConnecting(0, port, SIGSTOP);
  }
  if (program == "die while connecting") {
    return LeaveWhileConnecting(1, port, SIGKILL);
  }
  return Init(&argc, argv).status();
}

// ---- running them ----

Env Program(const std::string& name, int port = 0) {
  return {{kProgram, name}, {kPort, absl::StrCat(port)}};
}

std::vector<std::string> InitArgs(int rank, const std::string& where,
                                  const std::string& timeout = kTimeout) {
  return {absl::StrCat("--rendezvous=", where), absl::StrCat("--rank=", rank),
          "--world_size=2", absl::StrCat("--startup_timeout=", timeout)};
}

std::string Tcp(int port) { return absl::StrCat("tcp://127.0.0.1:", port); }

// Far more than the timeout, so that a busy host does not decide.
Finished End(Process& rank) { return rank.Finish(absl::Seconds(20)); }

TEST(StartupTest, TheStoresHostStopsWhileRanksMeet) {
  const int port = FreePort();
  Process host({}, Program("stop while meeting", port));
  ASSERT_TRUE(host.WaitForLines(1));
  Process rank1(InitArgs(1, Tcp(port)), Program("init"));
  const Finished run = End(rank1);
  EXPECT_EQ(run.code, 1);
  EXPECT_THAT(
      run.err,
      AllOf(HasSubstr(absl::StrCat(
                "DEADLINE_EXCEEDED: rendezvous ", Tcp(port),
                ": rank 0, which hosts the store, does not answer (it is "
                "stopped, or cut off) within 2 s, while rank 1 of 2 ")),
            // It has come, and may not have announced itself yet.
            testing::ContainsRegex("(registers|waits for the other ranks)\n")));
}

TEST(StartupTest, TheStoresHostStopsWhileRanksConnect) {
  const int port = FreePort();
  Process host({}, Program("stop while connecting", port));
  Process rank1(InitArgs(1, Tcp(port)), Program("init"));
  const Finished run = End(rank1);
  EXPECT_EQ(run.code, 1);
  EXPECT_EQ(run.err,
            "DEADLINE_EXCEEDED: rank 0, which hosts the store, does not answer "
            "(it is stopped, or cut off) within the start-up timeout of 2s, "
            "while rank 1 of 2 connects with the other ranks\n");
}

TEST(StartupTest, ARankThatDiesWhileRanksConnectIsNamed) {
  const int port = FreePort();
  Process rank0(InitArgs(0, Tcp(port)), Program("init"));
  Process rank1({}, Program("die while connecting", port));
  const Finished run = End(rank0);
  EXPECT_EQ(run.code, 1);
  EXPECT_THAT(run.err,
              HasSubstr("DEADLINE_EXCEEDED: rank 0 is not connected with all "
                        "of the 2 ranks within the start-up timeout of 2s; no "
                        "sign of life from rank 1: ended, or stopped"));
}

TEST(StartupTest, ARankThatDiesBeforeItHasToldOfItselfIsNamed) {
  const int port = FreePort();
  Process rank0(InitArgs(0, Tcp(port)), Program("init"));
  Process rank1({}, Program("die while registering", port));
  EXPECT_EQ(End(rank0).err,
            absl::StrCat("DEADLINE_EXCEEDED: rendezvous ", Tcp(port),
                         ": rank 1 of 2 has not come within 2 s\n"));
}

TEST(StartupTest, RanksOfDifferentBuildsAreToldApart) {
  const std::string here = BuildStamp();
  EXPECT_THAT(here, testing::ContainsRegex("protocol [0-9]+, libtorch [0-9]"));
  EXPECT_NE(BuildId(), "");
  for (const char* how : {"protocol", "age", "file"}) {
    const int port = FreePort();
    Process rank0(InitArgs(0, Tcp(port)), Program("init"));
    Process rank1({}, Program(absl::StrCat("another ", how), port));
    const Finished run = End(rank0);
    EXPECT_EQ(run.code, 1);
    if (how == std::string("file")) {
      // It goes on, in vain here.
      EXPECT_THAT(run.err,
                  HasSubstr(absl::StrCat(
                      "rank 1 runs another file than rank 0 (build ids "
                      "0123456789ab and ",
                      BuildId(), "); if it is not meant to, give all hosts")));
      continue;
    }
    EXPECT_EQ(run.err,
              absl::StrCat("FAILED_PRECONDITION: the ranks are of different "
                           "builds: rank 0 is of ",
                           here, ", rank 1 of ",
                           how == std::string("age")
                               ? "a build that is older than this check"
                               : "protocol 0, libtorch 2.10.0",
                           "; give all hosts the same build of the program\n"));
  }
}

TEST(StartupTest, AFileWithSomethingElseInIt) {
  const TempFolder folder;
  const std::string path = folder / "meet";
  std::ofstream(path) << "no record of a store";
  chmod(path.c_str(), 0600);
  Process rank0(InitArgs(0, absl::StrCat("file://", path), "0.2"),
                Program("init"));
  const Finished run = End(rank0);
  EXPECT_EQ(run.code, 1);
  EXPECT_EQ(run.err,
            absl::StrCat("DEADLINE_EXCEEDED: rendezvous file://", path,
                         ": the file gives no answer (it is locked, or what is "
                         "in it is not of this job or cut off: delete it, or "
                         "give another path) within 0.2 s, while rank 0 of 2 "
                         "reaches the store\n"));
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  tessera::ServeForks(tessera::kProgram, &argc, &argv);
  const char* const program = getenv(tessera::kProgram);
  if (program != nullptr) {
    const absl::Status status = tessera::RunProgram(program, argc, argv);
    if (status.ok()) tessera::ExitAtOnce(0);
    const std::string line = absl::StrCat(status.ToString(), "\n");
    if (write(STDERR_FILENO, line.data(), line.size()) < 0) _exit(99);
    tessera::ExitAtOnce(1);
  }
  testing::InitGoogleTest(&argc, argv);
  tessera::RunTestsAndExit();
}
