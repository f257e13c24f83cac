// Tests the sections trace, histograms and checkpoint.
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "config/config.h"
#include "config/config_report.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

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

// Notes of a configuration with this member.
std::vector<std::string> NotesOf(const std::string& member) {
  const auto report =
      ReadConfig(absl::StrCat("{\"train_batch_size\": 8, ", member, "}"), "f",
                 /*world_size=*/4, {}, /*ignore_unknown=*/false);
  TESSERA_EXPECT_OK(report.status());
  std::vector<std::string> notes;
  if (!report.ok()) return notes;
  EXPECT_TRUE(report->faults.empty());
  for (const ConfigFault& note : report->notes) notes.push_back(note.what);
  return notes;
}

TEST(HistogramsSection, SomethingHasToWriteThem) {
  EXPECT_THAT(NotesOf(R"("histograms": {"every_steps": 5})"),
              ElementsAre(HasSubstr("only the program's own writers")));
  EXPECT_THAT(NotesOf(R"("histograms": {"every_steps": 5},
                         "csv_monitor": {"enabled": true})"),
              SizeIs(1));
  EXPECT_THAT(NotesOf(R"("histograms": {"every_steps": 5},
                         "jsonl_monitor": {"enabled": true})"),
              IsEmpty());
  EXPECT_THAT(NotesOf(R"("histograms": {"weights": false})"), IsEmpty());
}

TEST(CheckpointSection, HasRanges) {
  for (const auto& [member, fault] :
       std::vector<std::pair<std::string, std::string>>{
           {"\"keep_last\": 0", "checkpoint.keep_last"},
           {"\"every_steps\": -1", "checkpoint.every_steps"},
           {"\"every_minutes\": -0.5", "checkpoint.every_minutes"},
           {"\"every_minute\": 5", "did you mean 'every_minutes'?"},
           {"\"patience\": 1.5", "checkpoint.patience"}}) {
    EXPECT_THAT(
        ParseConfig(absl::StrCat("{\"train_batch_size\": 8, \"checkpoint\": {",
                                 member, "}}"),
                    "f.json", 4)
            .status()
            .message(),
        HasSubstr(fault))
        << member;
  }
}

}  // namespace
}  // namespace tessera
