// Tests what run.json says of a training, of how it ended, and of those that
// went on from it.
#include <stdexcept>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status_matchers.h"
#include "comm/world/world.h"
#include "config/reader/json_reader.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "tests/observe/metrics_lines.h"
#include "tests/observe/monitors_test_util.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

constexpr int kWorldSize = 2;

// Trains a step and ends it. args: "close", "leave" or "throw", and the spec.
TESSERA_RANK_FUNCTION(EndsARun) {
  const std::string how(args.substr(0, 5));
  const TrainingSpec spec = TrainingSpec::FromText(args.substr(5));
  try {
    TESSERA_ASSIGN_OR_RETURN(Trainee t,
                             Trainee::Make(spec, world.communicator()));
    TESSERA_RETURN_IF_ERROR(t.TrainStep(0));
    if (how == "throw") throw std::runtime_error("of the program");
    if (how == "close") TESSERA_RETURN_IF_ERROR(t.engine->Close());
  } catch (const std::runtime_error&) {
    return std::string("caught");
  }
  return std::string("ended");
}

JsonValue RunOf(const std::string& folder) {
  const auto text = ReadWholeFile(folder + "/run/run.json");
  TESSERA_EXPECT_OK(text.status());
  auto run = ReadJson(text.value_or("{}"), "run.json");
  TESSERA_EXPECT_OK(run.status());
  return run.ok() ? *std::move(run) : JsonValue();
}

TEST_F(MonitorsTest, RunJsonSaysWhatItIs) {
  const TrainingSpec spec = Spec(3, Jsonl(folder_.path()));
  EXPECT_THAT(RunOnRanks(kWorldSize, "EndsARun", "close" + spec.ToText()),
              Each("ended"));
  const JsonValue run = RunOf(folder_.path());
  ASSERT_EQ(run.kind, JsonKind::kObject);
  EXPECT_EQ(run.Find("world_size")->number, kWorldSize);
  EXPECT_EQ(run.Find("stage")->number, 3);
  EXPECT_THAT(run.Find("hosts")->elements, SizeIs(kWorldSize));
  EXPECT_THAT(run.Find("units")->elements, Not(IsEmpty()));
  EXPECT_GT(run.Find("parameters")->number, 0);
  EXPECT_EQ(
      run.Find("config")->Find("zero_optimization")->Find("stage")->number, 3);
  EXPECT_THAT(run.Find("model")->text, Not(IsEmpty()));
  EXPECT_THAT(run.Find("model")->text, Not(HasSubstr("Impl")));
  EXPECT_THAT(run.Find("command")->text, HasSubstr("observe_test"));
}

TEST_F(MonitorsTest, RunJsonSaysHowEachProcessEnded) {
  const TrainingSpec spec = Spec(3, Jsonl(folder_.path()));
  for (const char* const how : {"close", "leave", "throw"}) {
    EXPECT_THAT(
        RunOnRanks(kWorldSize, "EndsARun", absl::StrCat(how, spec.ToText())),
        Each(absl::string_view(how) == "throw" ? "caught" : "ended"));
  }
  EXPECT_THAT(RunOnRanks(1, "EndsARun", "close" + spec.ToText()),
              Each("ended"));
  const JsonValue run = RunOf(folder_.path());
  ASSERT_EQ(run.kind, JsonKind::kObject);
  const auto& starts = run.Find("starts")->elements;
  ASSERT_THAT(starts, SizeIs(4));
  const char* const ends[] = {"closed", "ended", "failed", "closed"};
  for (size_t i = 0; i < starts.size(); ++i) {
    ASSERT_NE(starts[i].Find("end"), nullptr) << i;
    EXPECT_EQ(starts[i].Find("end")->text, ends[i]);
    EXPECT_EQ(starts[i].Find("world_size")->number, i == 3 ? 1 : kWorldSize);
    EXPECT_EQ(starts[i].Find("step")->number, 1);
    EXPECT_GE(starts[i].Find("end_time")->number,
              starts[i].Find("time")->number);
  }
}

}  // namespace
}  // namespace tessera
