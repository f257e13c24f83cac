#include "comm/launch/job.h"

#include <string>
#include <utility>
#include <vector>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A writable argv.
class Args {
 public:
  explicit Args(std::vector<std::string> args) : args_(std::move(args)) {
    for (std::string& arg : args_) pointers_.push_back(arg.data());
    pointers_.push_back(nullptr);
    argc = static_cast<int>(args_.size());
    argv = pointers_.data();
  }
  std::vector<std::string> Rest() const { return {argv, argv + argc}; }

  int argc;
  char** argv;

 private:
  std::vector<std::string> args_;
  std::vector<char*> pointers_;
};

TEST(TakeJobFlagsTest, TakesOursAndLeavesTheRest) {
  Args args({"prog", "--world=4", "--stage=3", "--rendezvous=tcp://h:1",
             "--rank=2", "--world_size=8", "--startup_timeout=0.5",
             "--grace=90", "--plan_world", "64", "--worldly", "x", "--",
             "--world=5"});
  TESSERA_ASSERT_OK_AND_ASSIGN(const JobFlags flags,
                               TakeJobFlags(&args.argc, args.argv));
  EXPECT_EQ(flags.world, 4);
  EXPECT_EQ(flags.rendezvous, "tcp://h:1");
  EXPECT_EQ(flags.rank, 2);
  EXPECT_EQ(flags.world_size, 8);
  EXPECT_EQ(flags.startup_timeout, absl::Milliseconds(500));
  EXPECT_EQ(flags.grace, absl::Seconds(90));
  EXPECT_EQ(flags.plan_world, 64);
  EXPECT_THAT(args.Rest(), ElementsAre("prog", "--stage=3", "--worldly", "x",
                                       "--", "--world=5"));
  EXPECT_EQ(args.argv[args.argc], nullptr);
}

TEST(TakeJobFlagsTest, TakesAValueThatStandsApart) {
  Args args({"prog", "--world", "4", "--stage", "3", "--rendezvous",
             "tcp://h:1", "x"});
  TESSERA_ASSERT_OK_AND_ASSIGN(const JobFlags flags,
                               TakeJobFlags(&args.argc, args.argv));
  EXPECT_EQ(flags.world, 4);
  EXPECT_EQ(flags.rendezvous, "tcp://h:1");
  EXPECT_THAT(args.Rest(), ElementsAre("prog", "--stage", "3", "x"));
}

TEST(MisspeltJobFlagTest, IsNamedWithWhatWasMeant) {
  const auto find = [](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "prog");
    Args args(std::move(arguments));
    return MisspeltJobFlag(args.argc, args.argv);
  };
  EXPECT_EQ(find({"--stage=3", "--wrld=2"}),
            "'--wrld=2' (did you mean --world?)");
  EXPECT_EQ(find({"-world=2"}), "'-world=2' (did you mean --world?)");
  EXPECT_EQ(find({"--world-size", "2"}),
            "'--world-size' (did you mean --world_size?)");
  EXPECT_EQ(find({"--stage=3", "wrld", "--data=words", "--seed=1"}), "");
  EXPECT_EQ(find({"--", "--wrld=2"}), "");
}

TEST(TakeJobFlagsTest, GraceMayBeNothingOrEndless) {
  for (const auto& [arg, grace] :
       std::vector<std::pair<std::string, absl::Duration>>{
           {"--grace=0", absl::ZeroDuration()},
           {"--grace=inf", absl::InfiniteDuration()},
           {"--no_grace", kSignalGrace}}) {
    Args args({"prog", arg});
    TESSERA_ASSERT_OK_AND_ASSIGN(const JobFlags flags,
                                 TakeJobFlags(&args.argc, args.argv));
    EXPECT_EQ(flags.grace, grace) << arg;
  }
}

TEST(TakeJobFlagsTest, RefusesByName) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"--world=0", "--world: expected an integer from 1 to 1048576, got '0'"},
      {"--world=3000000", "from 1 to 1048576, got '3000000'"},
      {"--world=abc", "got 'abc'"},
      {"--world=-2", "got '-2'"},
      {"--world", "got ''"},
      {"--world=99999999999", "got '99999999999'"},
      {"--rank=-1", "--rank: expected an integer from 0 to 1048575"},
      {"--world_size=0", "--world_size"},
      {"--grace=-1",
       "--grace: expected a number of seconds, at least 0, got '"},
      {"--grace=soon", "--grace: expected"},
      {"--grace=nan", "--grace: expected"},
      {"--grace", "--grace: expected"},
      {"--startup_timeout=0", "--startup_timeout"},
      {"--startup_timeout=soon", "positive number of seconds"},
      {"--rendezvous=", "--rendezvous"},
      {"--prefix_output=yes", "--prefix_output: expected auto, on or off"},
      {"--numa_binding=on", "--numa_binding: expected node or off"},
  };
  for (const auto& [arg, words] : cases) {
    Args args({"prog", "a", arg});
    EXPECT_THAT(TakeJobFlags(&args.argc, args.argv),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(words)));
    EXPECT_EQ(args.argc, 3);
  }
}

// --help has a line for each, and each of them is read.
TEST(AllJobFlagsTest, AreTaken) {
  const std::vector<JobFlagHelp> flags = AllJobFlags();
  EXPECT_EQ(flags.size(), 9u);
  for (const JobFlagHelp& flag : flags) {
    EXPECT_NE(std::string(flag.text), "") << flag.name;
    std::string value = std::string(flag.value);
    value = value.substr(0, value.find('|'));
    if (value == "N" || value == "R" || value == "W" || value == "SECONDS") {
      value = "3";
    }
    Args args({"prog", std::string("--") + flag.name + "=" + value});
    TESSERA_EXPECT_OK(TakeJobFlags(&args.argc, args.argv).status());
    EXPECT_EQ(args.argc, 1) << flag.name;
  }
}

class FindJobTest : public testing::Test {
 protected:
  void Set(const char* name, const char* value) {
    sources_.variables[name] = value;
  }
  absl::StatusOr<Job> Find(const JobFlags& flags = {}) {
    return FindJob(flags, sources_);
  }
  JobSources sources_;
};

TEST_F(FindJobTest, NothingToldIsAWorldOfOne) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const Job job, Find());
  EXPECT_EQ(job.rank, 0);
  EXPECT_EQ(job.world_size, 1);
  EXPECT_EQ(job.rendezvous, "");
}

TEST_F(FindJobTest, TorchrunsVariables) {
  Set("RANK", "1");
  Set("WORLD_SIZE", "3");
  Set("MASTER_ADDR", "node7");
  Set("MASTER_PORT", "29500");
  TESSERA_ASSERT_OK_AND_ASSIGN(Job job, Find());
  EXPECT_EQ(job.rank, 1);
  EXPECT_EQ(job.world_size, 3);
  EXPECT_EQ(job.rendezvous, "tcp://node7:29500");
  EXPECT_FALSE(job.store_hosted);
  Set("TORCHELASTIC_USE_AGENT_STORE", "True");
  Set("TORCHELASTIC_RESTART_COUNT", "2");
  TESSERA_ASSERT_OK_AND_ASSIGN(job, Find());
  EXPECT_TRUE(job.store_hosted);
  EXPECT_EQ(job.attempt, "2");
}

TEST_F(FindJobTest, FlagsGoBeforeVariables) {
  Set("RANK", "1");
  Set("WORLD_SIZE", "3");
  JobFlags flags;
  flags.rank = 0;
  flags.world_size = 2;
  flags.rendezvous = "file:///tmp/x";
  TESSERA_ASSERT_OK_AND_ASSIGN(const Job job, Find(flags));
  EXPECT_EQ(job.rank, 0);
  EXPECT_EQ(job.world_size, 2);
  EXPECT_EQ(job.rendezvous, "file:///tmp/x");
}

TEST_F(FindJobTest, WorldOfOneByFlagIgnoresVariables) {
  Set("RANK", "1");
  Set("WORLD_SIZE", "3");
  JobFlags flags;
  flags.world = 1;
  TESSERA_ASSERT_OK_AND_ASSIGN(const Job job, Find(flags));
  EXPECT_EQ(job.world_size, 1);
}

TEST_F(FindJobTest, RefusesByName) {
  const auto expect = [this](const std::string& words) {
    EXPECT_THAT(Find(),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(words)));
  };
  Set("RANK", "3");
  expect("WORLD_SIZE is missing");
  Set("WORLD_SIZE", "3");
  expect("RANK is 3, expected 0 to 2");
  Set("RANK", "x");
  expect("RANK");
  Set("RANK", "-1");
  expect("RANK");
  Set("RANK", "0");
  expect("MASTER_ADDR is missing");
  Set("MASTER_ADDR", "localhost");
  expect("MASTER_PORT is missing");
  Set("MASTER_PORT", "70000");
  expect("MASTER_PORT");
  sources_.variables.erase("RANK");
  expect("RANK is missing");
  Set("WORLD_SIZE", "0");
  expect("WORLD_SIZE");
}

}  // namespace
}  // namespace tessera
