// A job that is asked to end saves where it is, and ends: this test program
// runs again as one that trains for ever (see kProgram) with a
// CheckpointManager.
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "checkpoint/format/step_folders.h"
#include "comm/world/world.h"
#include "config/config.pb.h"
#include "engine/checkpoint_manager.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/fork_server.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"
#include "third_party/gtest/run_and_exit.h"
#include "torch/torch.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

constexpr char kProgram[] = "TESSERA_STOP_TEST_FOLDER";

// ---- the program ----

// The line is one write, so lines of ranks do not mix.
void Print(const std::string& line) {
  if (write(STDOUT_FILENO, line.data(), line.size()) < 0) _exit(99);
}

absl::Status Train(const World& world, const std::string& dir) {
  torch::nn::Linear model(4, 4);
  EngineOptions of_engine;
  of_engine.communicator = world.communicator();
  of_engine.sync_from_rank0 = true;
  proto::Config config;
  config.mutable_zero_optimization()->set_stage(1);
  config.mutable_optimizer()->set_type("AdamW");
  config.set_train_micro_batch_size_per_gpu(1);
  TESSERA_ASSIGN_OR_RETURN(const auto engine,
                           Engine::Create(model, config, of_engine));
  CheckpointManagerOptions options;
  options.dir = dir;
  options.async = true;
  TESSERA_ASSIGN_OR_RETURN(const auto manager,
                           CheckpointManager::Create(engine.get(), options));
  while (true) {
    TESSERA_RETURN_IF_ERROR(CatchTorch("forward", [&] {
      return engine->Backward(model(torch::ones({1, 4})).sum());
    }));
    TESSERA_RETURN_IF_ERROR(engine->Step());
    TESSERA_ASSIGN_OR_RETURN(const bool stop, manager->MaybeSave());
    if (stop) {
      Print(absl::StrCat("ended at ", engine->step(), "\n"));
      return absl::OkStatus();
    }
    if (engine->step() == 1) Print(absl::StrCat("rank ", getpid(), "\n"));
  }
}

int RunProgram(const std::string& dir, int argc, char** argv) {
  absl::StatusOr<const World*> world = Init(&argc, argv);
  const absl::Status status = world.ok() ? Train(**world, dir) : world.status();
  if (!status.ok()) {
    const std::string line = absl::StrCat(status.ToString(), "\n");
    if (write(STDERR_FILENO, line.data(), line.size()) < 0) _exit(99);
  }
  Shutdown();
  return status.ok() ? 0 : 1;
}

// ---- running it ----

std::vector<pid_t> RankPids(const Process& launcher) {
  std::vector<pid_t> pids;
  for (absl::string_view line : absl::StrSplit(launcher.out(), '\n')) {
    const std::vector<absl::string_view> words = absl::StrSplit(line, ' ');
    int pid = 0;
    if (words.size() == 2 && absl::SimpleAtoi(words[1], &pid)) {
      pids.push_back(pid);
    }
  }
  return pids;
}

// With `all` the whole group of processes gets the signal, as a scheduler sends
// it, so ranks get it from the launcher, too.
void ExpectSavedAfter(int sig, bool all) {
  const TempFolder folder;
  const std::string dir = folder / "run";
  Process launcher({"--world=2", "--grace=60"}, {{kProgram, dir}});
  ASSERT_TRUE(launcher.WaitForLines(2)) << launcher.out();
  const std::vector<pid_t> ranks = RankPids(launcher);
  ASSERT_EQ(ranks.size(), 2);
  kill(launcher.pid(), sig);
  for (const pid_t rank : ranks) {
    if (all) kill(rank, sig);
  }
  const Finished run = launcher.Finish();
  const auto saved = ListStepFolders(dir, FileSystem::Real()).value();
  ASSERT_EQ(saved.size(), 1) << run.out << run.err;
  const std::string path = absl::StrCat(dir, "/", saved[0].name);
  EXPECT_TRUE(CheckFilesOf(path, FileSystem::Real()).ok());
  const std::string end = absl::StrCat("ended at ", saved[0].step, "\n");
  EXPECT_THAT(run.out, HasSubstr(absl::StrCat(end, end)));
  EXPECT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.err, HasSubstr(sig == SIGTERM ? "] SIGTERM" : "] SIGUSR1"));
  EXPECT_THAT(run.err,
              HasSubstr(absl::StrCat(": step ", saved[0].step, " is saved in ",
                                     dir, ", and the run ends\n")));
}

TEST(StopTest, SavesAndEndsAfterSigterm) {
  ExpectSavedAfter(SIGTERM, /*all=*/false);
}
TEST(StopTest, SavesAndEndsAfterSigtermOfAll) {
  ExpectSavedAfter(SIGTERM, /*all=*/true);
}
TEST(StopTest, SavesAndEndsAfterSigusr1) {
  ExpectSavedAfter(SIGUSR1, /*all=*/false);
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  if (getenv(tessera::kProgram) == nullptr) {
    // Whoever runs this may ignore them.
    for (int sig : {SIGTERM, SIGUSR1}) signal(sig, SIG_DFL);
  }
  tessera::ServeForks(tessera::kProgram, &argc, &argv);
  if (const char* const dir = getenv(tessera::kProgram)) {
    tessera::ExitAtOnce(tessera::RunProgram(dir, argc, argv));
  }
  testing::InitGoogleTest(&argc, argv);
  tessera::RunTestsAndExit();
}
