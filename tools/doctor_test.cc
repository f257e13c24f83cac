#include "tools/doctor.h"

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "base/command/command_line.h"
#include "base/command/command_terminal.h"
#include "config/reader/json_reader.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

const Finding& Of(const std::string& what, const std::vector<Finding>& all) {
  for (const Finding& finding : all) {
    if (finding.what == what) return finding;
  }
  ADD_FAILURE() << what;
  return all[0];
}

TEST(DoctorTest, OnlyWhatIsNotGoodHasAdvice) {
  const std::vector<Finding> findings = Examine(testing::TempDir());
  EXPECT_EQ(findings.size(), 10u);
  for (const Finding& finding : findings) {
    EXPECT_THAT(finding.text, Not(IsEmpty())) << finding.what;
    EXPECT_EQ(finding.advice.empty(), finding.grade == Finding::Grade::kGood)
        << finding.what;
  }
  // Tests cannot do without these.
  EXPECT_EQ(Of("network", findings).grade, Finding::Grade::kGood);
  EXPECT_EQ(Of("shared memory", findings).grade, Finding::Grade::kGood);
}

TEST(DoctorTest, SaysWhatIsWrong) {
  const std::string root = testing::TempDir() + "/root";
  std::filesystem::create_directories(root + "/proc");
  EXPECT_EQ(Of("memory", Examine(".", root)).grade, Finding::Grade::kBad);
  std::ofstream(root + "/proc/meminfo") << "MemAvailable: 1024 kB\n";
  const std::vector<Finding> findings = Examine("/nowhere/at/all", root);
  EXPECT_EQ(Of("memory", findings).grade, Finding::Grade::kSlow);
  EXPECT_EQ(Of("memory", findings).text, "0.0 GiB can be taken");
  EXPECT_EQ(Of("disk", findings).grade, Finding::Grade::kBad);
  EXPECT_THAT(Of("disk", findings).text,
              HasSubstr("/nowhere/at/all: No such file"));
}

TEST(DoctorTest, TheCommandHasAnExitStatus) {
  const CommandLine tool("tessera", {DoctorCommand()});
  std::ostringstream out, err;
  EXPECT_EQ(tool.Run({"doctor", "--dir", "/nowhere", "--json"}, &out, &err), 1);
  const absl::StatusOr<JsonValue> json = ReadJson(out.str(), "");
  ASSERT_TRUE(json.ok()) << json.status();
  EXPECT_EQ(json->elements.back().Find("grade")->text, "FAIL");
  out.str("");
  EXPECT_EQ(tool.Run({"doctor", "--dir", testing::TempDir()}, &out, &err), 0)
      << out.str();
  EXPECT_THAT(out.str(), HasSubstr("ok    network        127.0.0.1"));
  EXPECT_EQ(err.str(), "");
  EXPECT_THAT(out.str(), Not(HasSubstr("\x1b")));
  CommandTerminal terminal;
  terminal.colors_out = true;
  EXPECT_EQ(tool.Run({"doctor", "--dir", "/nowhere"}, &out, &err, terminal), 1);
  EXPECT_THAT(out.str(), AllOf(HasSubstr("\x1b[31mFAIL \x1b[0m disk"),
                               HasSubstr("\x1b[32mok   \x1b[0m network")));
}

}  // namespace
}  // namespace tessera
