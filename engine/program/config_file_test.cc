#include "engine/program/config_file.h"

#include <filesystem>
#include <fstream>
#include <string>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::EndsWith;

class ConfigFileTest : public testing::Test {
 protected:
  void SetUp() override {
    fs::remove_all(root_);
    fs::create_directories(root_ / "bin/program.runfiles/main/sub");
    fs::create_directories(root_ / "here");
    before_ = fs::current_path();
    fs::current_path(root_ / "here");
  }
  void TearDown() override { fs::current_path(before_); }
  // Makes a file that has its own name in it.
  void Make(const std::string& name) {
    fs::create_directories((root_ / name).parent_path());
    std::ofstream(root_ / name) << name;
  }
  std::string Find(const std::string& path) const {
    const auto found = FindConfigFile(path, program_);
    if (!found.ok()) return std::string(found.status().message());
    std::string name;
    std::ifstream(*found) >> name;
    return name;
  }

  const fs::path root_ = fs::path(testing::TempDir()) / "config_file";
  const std::string program_ = root_ / "bin/program";
  fs::path before_;
};

TEST_F(ConfigFileTest, TheFirstPlaceThatHasIt) {
  Make("bin/program.runfiles/main/sub/a.json");
  EXPECT_EQ(Find("sub/a.json"), "bin/program.runfiles/main/sub/a.json");
  Make("bin/a.json");
  EXPECT_EQ(Find("sub/a.json"), "bin/a.json");
  Make("bin/sub/a.json");
  EXPECT_EQ(Find("sub/a.json"), "bin/sub/a.json");
  fs::create_directories(root_ / "here/sub/a.json");  // a folder is no file
  EXPECT_EQ(Find("sub/a.json"), "bin/sub/a.json");
  fs::remove_all(root_ / "here/sub");
  Make("here/sub/a.json");
  EXPECT_EQ(Find("sub/a.json"), "here/sub/a.json");
}

TEST_F(ConfigFileTest, AnAbsolutePathIsItself) {
  Make("bin/a.json");
  Make("other/b.json");
  EXPECT_EQ(Find(root_ / "other/b.json"), "other/b.json");
  EXPECT_EQ(Find("/nowhere/a.json"),
            "no configuration '/nowhere/a.json'; looked for /nowhere/a.json; "
            "give the file with --config");
}

TEST_F(ConfigFileTest, TheErrorNamesAllPlaces) {
  EXPECT_THAT(FindConfigFile("sub/a.json", program_),
              StatusIs(absl::StatusCode::kNotFound));
  const std::string root = root_.string();
  EXPECT_EQ(Find("sub/a.json"), "no configuration 'sub/a.json'; looked for " +
                                    root + "/here/sub/a.json, " + root +
                                    "/bin/sub/a.json, " + root +
                                    "/bin/a.json; give the file with --config");
}

// A model may be a folder; a folder of that name beside the program is found.
TEST_F(ConfigFileTest, OtherFilesMayBeFolders) {
  fs::create_directories(root_ / "bin/model");
  const std::string root = root_.string();
  EXPECT_THAT(FindProgramFile("sub/model", program_, "model"),
              IsOkAndHolds(root + "/bin/model"));
  fs::create_directories(root_ / "here/sub/model");
  EXPECT_THAT(FindProgramFile("sub/model", program_, "model"),
              IsOkAndHolds("sub/model"));
  EXPECT_EQ(FindProgramFile("/nowhere", program_, "model").status().message(),
            "no file or folder '/nowhere'; looked for /nowhere; give its path "
            "with --model");
}

TEST(RunningProgramTest, IsThisTest) {
  EXPECT_THAT(RunningProgram(), EndsWith("/program_test"));
}

}  // namespace
}  // namespace tessera
