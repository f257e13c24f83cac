#include "checkpoint/exchange/command.h"

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "checkpoint/format/sample_checkpoint.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class CommandTest : public testing::Test {
 protected:
  CommandTest() {
    std::string pattern = testing::TempDir() + "/command_XXXXXX";
    EXPECT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    Save(1, "a");
    Save(2, "b");
  }
  ~CommandTest() override { fs::remove_all(folder_); }

  void Save(int seed, const std::string& name) {
    bool committed = false;
    TESSERA_ASSERT_OK(SampleCheckpoint(seed).Save(
        folder_ + "/" + name, FileSystem::Real(), 2, &committed));
  }
  int Run(const std::vector<std::string>& args) {
    std::ostringstream out, err;
    const int status = RunCheckpointCommand(args, &out, &err);
    out_ = out.str();
    err_ = err.str();
    return status;
  }

  std::string folder_, out_, err_;
};

TEST_F(CommandTest, ListsAndShows) {
  EXPECT_EQ(Run({"ls", folder_}), 0);
  EXPECT_THAT(out_, AllOf(HasSubstr("/a: step 1, 196 numbers"),
                          HasSubstr("/b: step 2"), HasSubstr("in 2 files")));
  EXPECT_EQ(Run({"show", folder_ + "/b"}), 0);
  EXPECT_THAT(out_, HasSubstr("layer1.weight [65]: value BF16\n"));
  EXPECT_EQ(Run({"ls", folder_ + "/b"}), 0);
  fs::create_directory(folder_ + "/none");
  EXPECT_EQ(Run({"ls", folder_ + "/none"}), 1);
}

TEST_F(CommandTest, Verifies) {
  EXPECT_EQ(Run({"verify", folder_ + "/a"}), 0);
  EXPECT_THAT(out_, StartsWith(folder_ + "/a: whole; step 1"));
  for (const auto& entry : fs::directory_iterator(folder_ + "/a")) {
    if (entry.path().extension() != ".rank-00001") continue;
    std::fstream(entry.path(), std::ios::in | std::ios::out) << "?";
  }
  EXPECT_EQ(Run({"verify", folder_ + "/a"}), 1);
  EXPECT_THAT(err_, AllOf(HasSubstr("DATA_LOSS"), HasSubstr("rank-00001")));
}

TEST_F(CommandTest, SaysWhatDiffers) {
  EXPECT_EQ(Run({"diff", folder_ + "/a", folder_ + "/a"}), 0);
  EXPECT_THAT(out_, HasSubstr("7 states are equal to the bit, 0 differ"));
  EXPECT_EQ(Run({"diff", folder_ + "/a", folder_ + "/b"}), 1);
  EXPECT_THAT(out_, AllOf(HasSubstr("layer1.weight value: 65 of 65 numbers "),
                          HasSubstr("0 states are equal")));
}

TEST_F(CommandTest, RemovesNothingElse) {
  std::ofstream(folder_ + "/a/notes") << "mine";
  EXPECT_EQ(Run({"rm", folder_ + "/a"}), 0);
  EXPECT_TRUE(fs::exists(folder_ + "/a/notes"));
  EXPECT_EQ(Run({"rm", folder_ + "/b"}), 0);
  EXPECT_FALSE(fs::exists(folder_ + "/b"));
  EXPECT_EQ(Run({"rm", folder_ + "/b"}), 1);
  EXPECT_THAT(err_, HasSubstr("NOT_FOUND"));
}

TEST_F(CommandTest, WrongCommands) {
  for (const std::vector<std::string>& args :
       {std::vector<std::string>{}, {"show"}, {"diff", "a"}, {"mend", "a"}}) {
    EXPECT_EQ(Run(args), 2);
    EXPECT_THAT(err_, HasSubstr("verify DIR"));
  }
}

}  // namespace
}  // namespace tessera
