// Tests the trace section.
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "config/config.h"
#include "config/config_report.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

absl::StatusOr<ConfigReport> Read(const std::string& section) {
  return ReadConfig(
      absl::StrCat("{\"train_batch_size\": 8, \"trace\": ", section, "}"), "f",
      /*world_size=*/4, {}, /*ignore_unknown=*/false);
}

TEST(TraceSection, Defaults) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const ConfigReport report, Read("{}"));
  EXPECT_TRUE(report.faults.empty());
  const proto::Trace& trace = report.config.trace();
  EXPECT_FALSE(trace.enabled());
  EXPECT_EQ(trace.start_step(), 3);
  EXPECT_EQ(trace.end_step(), 5);
  EXPECT_EQ(trace.ranks_size(), 0);
}

TEST(TraceSection, FaultsAreNamed) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"start_step": 6})",
       "trace.end_step: expected at least start_step, 6, got 5"},
      {R"({"ranks": [0, 4]})", "trace.ranks: expected ranks of 0 to 3, got 4"},
      {R"({"ranks": [-1]})", "trace.ranks: expected ranks of 0 to 3, got -1"},
      {R"({"enabled": true, "output_path": ""})",
       "trace.output_path: expected a folder"},
  };
  for (const auto& [section, words] : cases) {
    TESSERA_ASSERT_OK_AND_ASSIGN(const ConfigReport report, Read(section));
    ASSERT_EQ(report.faults.size(), 1u) << section;
    EXPECT_THAT(
        absl::StrCat(report.faults[0].path, ": ", report.faults[0].what),
        HasSubstr(words));
  }
}

}  // namespace
}  // namespace tessera
