#include "engine/program/start.h"

#include <unistd.h>

#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/status_matchers.h"
#include "base/system/process_end.h"
#include "engine/program/seeds.h"
#include "engine/program/unclosed.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

ABSL_FLAG(int64_t, width, 8, "Width of the model.");

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StrEq;

constexpr char kJson[] = R"({
  "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2,
  "gradient_clipping": 1, "communication": {"timeout_seconds": 77}
})";

// Starts programs of one rank.
class StartTest : public testing::Test {
 protected:
  void SetUp() override {
    std::ofstream(path_) << kJson;
    SetProcessEndHandler([this](ProcessEnd why, int code) {
      EXPECT_EQ(why, ProcessEnd::kUsage);
      code_ = code;
    });
  }
  void TearDown() override {
    Shutdown();
    SetProcessEndHandler(nullptr);
  }

  absl::StatusOr<StartedJob> Start(std::vector<std::string> arguments) {
    words_ = {"/bin/program", "--world=1"};
    words_.insert(words_.end(), arguments.begin(), arguments.end());
    argv_.clear();
    for (std::string& word : words_) argv_.push_back(word.data());
    argv_.push_back(nullptr);
    argc_ = static_cast<int>(words_.size());
    testing::internal::CaptureStdout();
    testing::internal::CaptureStderr();
    auto job = tessera::Start(&argc_, argv_.data(), options_);
    out_ = testing::internal::GetCapturedStdout();
    err_ = testing::internal::GetCapturedStderr();
    return job;
  }

  const absl::FlagSaver defaults_;
  const std::string path_ = testing::TempDir() + "/start.json";
  StartOptions options_;
  std::vector<std::string> words_;
  std::vector<char*> argv_;
  int argc_ = 0;
  std::optional<int> code_;  // what the process would have ended with
  std::string out_, err_;
};

// As of `--config=<(...)`.
TEST_F(StartTest, AConfigurationIsReadOnce) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  ASSERT_EQ(write(ends[1], kJson, sizeof(kJson) - 1),
            static_cast<ssize_t>(sizeof(kJson) - 1));
  close(ends[1]);
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const StartedJob job,
      Start({absl::StrCat("--config=/dev/fd/", ends[0])}));
  EXPECT_EQ(job.config.gradient_clipping(), 1);
  close(ends[0]);
}

TEST_F(StartTest, UnknownKeysOfItsOwnTextMayBeIgnored) {
  options_.config_json = R"({"train_batch_size": 8, "mine": 1})";
  EXPECT_THAT(Start({}), StatusIs(StatusCode::kInvalidArgument,
                                  HasSubstr("<code>:1:25: mine: unknown key")));
  options_.ignore_unknown = true;
  TESSERA_EXPECT_OK(Start({}).status());
}

TEST_F(StartTest, KeysOfCommunicationNeedNoConfiguration) {
  options_.reads_config = false;
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const StartedJob job,
      Start({"--set", "communication.timeout_seconds=77"}));
  EXPECT_EQ(job.options.world.collective_timeout, absl::Seconds(77));
  TESSERA_EXPECT_OK(job.Load(path_).status());
  EXPECT_THAT(job.Load(""), StatusIs(StatusCode::kInvalidArgument,
                                     HasSubstr("path is empty")));
  EXPECT_THAT(Start({"--set", "communication.timeout=7"}),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("communication.timeout: unknown key")));
}

TEST_F(StartTest, ReadsFlagsAndConfigurationAndJoins) {
  options_.config = "nowhere.json";
  options_.set = {"gradient_clipping=2", "zero_optimization.stage=1"};
  options_.positional = true;
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const StartedJob job,
      Start({"--config", path_, "--set", "zero_optimization.stage=2", "a",
             "--width=3", "--startup_timeout=9", "b"}));
  EXPECT_EQ(job.world, World::Current());
  EXPECT_EQ(job.comm().world_size(), 1);
  EXPECT_EQ(job.world->options().collective_timeout, absl::Seconds(77));
  EXPECT_EQ(job.world->options().startup_timeout, absl::Seconds(9));
  EXPECT_EQ(job.config_path, path_);
  EXPECT_EQ(job.config.gradient_accumulation_steps(), 4);
  EXPECT_EQ(job.config.gradient_clipping(), 2);
  EXPECT_EQ(job.config.zero_optimization().stage(), 2);  // the user's
  EXPECT_EQ(absl::GetFlag(FLAGS_width), 3);
  ASSERT_EQ(argc_, 3);
  EXPECT_THAT(std::vector<std::string>(argv_.begin(), argv_.begin() + argc_),
              ElementsAre("/bin/program", "a", "b"));
  EXPECT_EQ(argv_[3], nullptr);
  EXPECT_FALSE(code_.has_value());
}

TEST_F(StartTest, OtherConfigurationsHaveTheSameKeysSet) {
  options_.reads_config = false;
  TESSERA_ASSERT_OK_AND_ASSIGN(const StartedJob job,
                               Start({"--set", "gradient_clipping=3"}));
  EXPECT_EQ(job.config_path, "");
  TESSERA_ASSERT_OK_AND_ASSIGN(const proto::Config config, job.Load(path_));
  EXPECT_EQ(config.gradient_clipping(), 3);
  EXPECT_THAT(job.Load("nowhere.json"),
              StatusIs(StatusCode::kNotFound, HasSubstr("looked for ")));
}

TEST_F(StartTest, TheConfigurationMayBeInTheCode) {
  options_.config_json = kJson;
  TESSERA_ASSERT_OK_AND_ASSIGN(const StartedJob job,
                               Start({"--set", "gradient_clipping=3"}));
  EXPECT_EQ(job.config.gradient_clipping(), 3);
  EXPECT_EQ(job.world->options().collective_timeout, absl::Seconds(77));
  Shutdown();
  std::ofstream(path_) << "{\"train_batch_size\": 5}";
  TESSERA_ASSERT_OK_AND_ASSIGN(const StartedJob other,
                               Start({"--config", path_}));
  EXPECT_EQ(other.config.train_batch_size(), 5);
  Shutdown();
  options_.config_json = "{\"train_batch_size\": -1}";
  EXPECT_THAT(Start({}), StatusIs(StatusCode::kInvalidArgument,
                                  HasSubstr("<code>:1:22: train_batch_size")));
}

TEST_F(StartTest, TheConfigurationMayBeFieldsInTheCode) {
  options_.training =
      TrainingConfig{.stage = 2,
                     .batch = 8,
                     .json = R"({"communication": {"timeout_seconds": 77}})"};
  options_.set = {"gradient_clipping=2"};
  TESSERA_ASSERT_OK_AND_ASSIGN(const StartedJob job,
                               Start({"--set", "gradient_clipping=3"}));
  EXPECT_EQ(job.config.zero_optimization().stage(), 2);
  EXPECT_EQ(job.config.gradient_clipping(), 3);
  EXPECT_EQ(job.world->options().collective_timeout, absl::Seconds(77));
  EXPECT_EQ(job.config_path, "");
  Shutdown();
  std::ofstream(path_) << "{\"train_batch_size\": 5}";
  TESSERA_ASSERT_OK_AND_ASSIGN(const StartedJob other,
                               Start({"--config", path_}));
  EXPECT_EQ(other.config.train_batch_size(), 5);
  Shutdown();
  options_.training->stage = 7;
  EXPECT_THAT(Start({}),
              StatusIs(StatusCode::kInvalidArgument,
                       "TrainingConfig: zero_optimization.stage: expected 0, "
                       "1, 2 or 3, got 7"));
  options_.config_json = kJson;
  EXPECT_THAT(Start({}),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("expected one configuration in the code")));
}

TEST_F(StartTest, PlansForOtherRanks) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const StartedJob job,
                               Start({"--config", path_, "--plan_world=4"}));
  EXPECT_EQ(job.config.gradient_accumulation_steps(), 1);
}

TEST_F(StartTest, ErrorsOfTheConfigurationComeBeforeRanks) {
  EXPECT_THAT(
      Start({"--config", path_, "--set", "zero_optimization.stage=7"}),
      StatusIs(StatusCode::kInvalidArgument,
               "--set zero_optimization.stage: expected 0, 1, 2 or 3, got 7"));
  EXPECT_EQ(World::Current(), nullptr);
  EXPECT_THAT(Start({}), StatusIs(StatusCode::kInvalidArgument,
                                  HasSubstr("give its file with --config")));
  EXPECT_FALSE(code_.has_value());
}

TEST_F(StartTest, HelpEndsWell) {
  options_.config = path_;
  EXPECT_THAT(Start({"--help"}), StatusIs(StatusCode::kCancelled));
  EXPECT_EQ(code_, 0);
  EXPECT_THAT(out_, HasSubstr("\n  --width               Width of the model."));
  EXPECT_THAT(out_, HasSubstr("\n  --world=N "));
  EXPECT_EQ(err_, "");
  EXPECT_EQ(World::Current(), nullptr);
}

TEST_F(StartTest, AFaultyFlagEndsWithCodeTwo) {
  options_.config = path_;
  EXPECT_THAT(Start({"--widht=3"}), StatusIs(StatusCode::kCancelled));
  EXPECT_EQ(code_, 2);
  EXPECT_EQ(err_,
            "program: unknown flag --widht (did you mean --width?); --help "
            "lists the flags\n");
  EXPECT_EQ(World::Current(), nullptr);
}

TEST_F(StartTest, TheProgramChecksItsFlags) {
  options_.flags_read = [&](StartOptions* options) {
    if (absl::GetFlag(FLAGS_width) < 0) {
      return absl::InvalidArgumentError("--width: expected at least 0");
    }
    options->config = path_;
    options->set.push_back("gradient_clipping=5");
    return absl::OkStatus();
  };
  EXPECT_THAT(Start({"--width=-1"}), StatusIs(StatusCode::kCancelled));
  EXPECT_EQ(code_, 2);
  EXPECT_EQ(err_, "program: --width: expected at least 0\n");
  TESSERA_ASSERT_OK_AND_ASSIGN(const StartedJob job, Start({"--width=1"}));
  EXPECT_EQ(job.config.gradient_clipping(), 5);
}

TEST_F(StartTest, SeedsAreTheSameAndThenTheRanksOwn) {
  options_.reads_config = false;
  TESSERA_ASSERT_OK_AND_ASSIGN(const StartedJob job, Start({}));
  const auto drawn = [](uint64_t seed) {
    at::manual_seed(seed);
    return at::rand({4});
  };
  const at::Tensor with_7 = drawn(7), with_8 = drawn(8);
  SeedAll(7, *job.world);
  EXPECT_TRUE(at::equal(at::rand({4}), with_7));
  SeedThisRank(/*alike=*/1, /*stage_ranks=*/0);
  EXPECT_TRUE(at::equal(at::rand({4}), with_8));
  // Once: the next engine changes nothing.
  const at::Tensor after = drawn(9);
  at::manual_seed(9);
  SeedThisRank(/*alike=*/1, /*stage_ranks=*/0);
  EXPECT_TRUE(at::equal(at::rand({4}), after));
}

TEST(RunMainTest, ReturnsTheExitCode) {
  std::string program = "/bin/program";
  char* argv[] = {program.data(), nullptr};
  testing::internal::CaptureStderr();
  EXPECT_EQ(RunMain(1, argv, [](int, char**) { return absl::OkStatus(); }), 0);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  testing::internal::CaptureStderr();
  EXPECT_EQ(
      RunMain(1, argv,
              [](int, char**) { return absl::NotFoundError("no such file"); }),
      1);
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "program: NOT_FOUND: no such file\n");
  testing::internal::CaptureStderr();
  EXPECT_EQ(RunMain(1, argv,
                    [](int, char**) -> absl::Status {
                      at::zeros({2}).view({3});
                      return absl::OkStatus();
                    }),
            1);
  EXPECT_THAT(
      testing::internal::GetCapturedStderr(),
      HasSubstr(
          "program: INTERNAL: uncaught exception: shape '[3]' is invalid"));
}

TEST(RunMainTest, WarnsOfAnEngineThatWasNotClosed) {
  std::string program = "/bin/program";
  char* argv[] = {program.data(), nullptr};
  testing::internal::CaptureStderr();
  EXPECT_EQ(RunMain(1, argv,
                    [](int, char**) {
                      NoteUnclosedEngine();
                      return absl::OkStatus();
                    }),
            0);
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              HasSubstr("the program ended without Engine::Close"));
  testing::internal::CaptureStderr();
  RunMain(1, argv, [](int, char**) -> absl::Status {
    NoteUnclosedEngine();
    return absl::NotFoundError("no such file");
  });
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "program: NOT_FOUND: no such file\n");
}

}  // namespace
}  // namespace tessera
